"""From an image to its mask, and what that is worth: segmenter, scores, pictures."""
