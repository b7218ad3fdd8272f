"""Published looped models in plain PyTorch, of any size: the code of the zoo's adapted models."""
