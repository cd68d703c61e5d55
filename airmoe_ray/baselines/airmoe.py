"""AirMoE, and our literal reading of its Algorithm 1."""

from airmoe_ray.baselines.method import Method, Setting, changed
from airmoe_ray.config import Config


class AirMoEMethod(Method):
    """As configured; `airmoe+head` is beside a head at the cloud, which the paper does not have."""

    name, title, group, air = "airmoe", "AirMoE", "AirMoE", True
    about = "clients chosen by the divergence of their statistics, weighted by that of their hidden features"
    in_paper = "AirMoE"

    def configure(self, base: Config, setting: Setting) -> Config:
        return changed(base, {"experts.shared": self.head, "routing.rule": "js"})


# soft renewal, reciprocal score, no alignment, FRLs by renewal alone, phi never updated: Algorithm 1 trains Enc_j and
# Dec_j only. sim_scale and eta are ours, the paper gives none. psi_j belongs to the expert and learns through beta.
# Eq. (24) is the whole loss, on what the air delivers: no refiner, Lovasz loss or class weights, and one K throughout.
_LITERAL = {
    "experts.refiner": 0,
    "frl.renewal": "soft",
    "frl.sim_scale": 10.0,
    "frl.eta": 0.1,
    "frl.learn": "renewal",
    "routing.rule": "js",
    "routing.score": "reciprocal",
    "routing.fusion": "divergence",
    "train.lambda_align": 0.0,
    "train.lambda_iou": 0.0,
    "train.class_balance": 0.0,
    "train.top_k": None,
    "train.query_lr_factor": 0.0,
    "train.warm_start.fill_frl": False,
    "train.warm_start.local_epochs": 0,
    "train.warm_start.shared_epochs": 0,
}


class LiteralReading(Method):
    """Algorithm 1 to the letter, with a random projection phi."""

    name, title, group, air = "airmoe-literal", "AirMoE, literal reading, random phi", "AirMoE", True
    about = "Algorithm 1 to the letter, our choices only where the paper is silent; phi stays as it was drawn"

    def configure(self, base: Config, setting: Setting) -> Config:
        return changed(base, {**_LITERAL, "experts.shared": self.head, "train.warm_start.enabled": False})


class LiteralFittedPhi(Method):
    """Algorithm 1 to the letter, with phi fitted to the training images before the first step."""

    name, title, group, air = "airmoe-literal-phi", "AirMoE, literal reading, fitted phi", "AirMoE", True
    about = "the literal reading with phi set to the principal axes of the pooled features, all else literal"

    def configure(self, base: Config, setting: Setting) -> Config:
        return changed(base, {**_LITERAL, "experts.shared": self.head, "train.warm_start.enabled": True})
