"""The frozen backbone, Eq. (7), and its features on disk."""
