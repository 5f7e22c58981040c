"""Attention on one device: one module for each library that can do it."""
