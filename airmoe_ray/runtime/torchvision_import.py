"""Lets a CUDA build of torchvision be imported beside a CPU build of torch.

Such a pair dies at import with `operator torchvision::nms does not exist`, because torchvision registers fake
kernels for operators its compiled library failed to bring. Declaring the two operators first is enough: nothing
here ever calls them. Import this module before torchvision or timm, in every process.
"""

import importlib
import sys

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_kept: list[torch.library.Library] = []  # the declarations live as long as their library


def _import_torchvision() -> None:
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]  # half imported
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(operator + _SCHEMA)
        _kept.append(library)


_import_torchvision()
