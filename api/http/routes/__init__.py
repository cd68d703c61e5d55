"""The routes, one router a file: segmentation, the system, the Open Inference Protocol, the page."""
