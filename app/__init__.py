"""Pinned multi-GPU PyTorch images, proven, and a BERT trainer that runs in them."""

__version__ = "0.1.0"
