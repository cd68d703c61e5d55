"""AirMoE: statistic-augmented over-the-air mixture of experts, whole and in one process.

Follow one image: `moe.py` reads like the paper's algorithm box and calls everything else.
"""

__version__ = "0.3.0"
