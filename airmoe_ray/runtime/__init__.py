"""What any numerical program needs and the paper does not name: randomness, devices, workers, progress."""
