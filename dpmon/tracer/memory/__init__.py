"""Memory of models, gradients and optimizer states."""
