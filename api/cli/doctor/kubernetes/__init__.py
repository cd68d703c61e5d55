"""`airmoe doctor --cluster` of a file for KubeRay: its objects, its pods, and the Kubernetes cluster it is for."""
