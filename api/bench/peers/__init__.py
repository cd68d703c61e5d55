"""The same model on peers: Ray Serve and Flower, tuned as their documentation says."""
