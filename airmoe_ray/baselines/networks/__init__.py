"""How a single model, a network from images to logits, is trained, kept and scored like any other run."""
