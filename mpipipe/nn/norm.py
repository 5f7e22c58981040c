"""Normalisation over the last axis."""

from __future__ import annotations

import numpy as np

from mpipipe.nn.blocks import blocks, rows
from mpipipe.nn.layer import Layer, check_features, check_positive
from mpipipe.nn.parameters import Parameter, ones, zeros


class RMSNorm(Layer):
    """y = gain * x / sqrt(mean(x^2) + eps) (Zhang and Sennrich, "Root mean square layer normalization", 2019).

    With n = x * r, r = 1 / sqrt(mean(x^2) + eps): dgain = sum over rows of dy * n, and
    dx = r * (gain * dy - n * mean(gain * dy * n)).
    """

    gain: np.ndarray
    gain_grad: np.ndarray

    def __init__(self, dim: int, eps: float = 1e-6):
        check_positive(dim=dim)
        self.dim, self.eps = dim, eps
        self.declared = {"gain": Parameter((dim,), ones, decay=False)}

    def forward(self, x):
        check_features(self, x, self.dim)
        flat = rows(x)
        y = np.empty(flat.shape, flat.dtype)
        scale = np.empty((len(flat), 1), flat.dtype)
        for at in blocks(*flat.shape):
            part, r = flat[at], scale[at]
            _inverse_root(part, self.eps, r)
            out = np.multiply(part, r, out=y[at])
            np.multiply(out, self.gain, out=out)
        return y.reshape(x.shape), (flat, scale)

    def backward_input(self, dy, saved):
        x, scale = saved
        dflat = rows(dy)
        dx = np.empty_like(x)
        dgain = np.zeros_like(self.gain)
        for at in blocks(*x.shape):
            normal = np.multiply(x[at], scale[at])
            _backward_block(dflat[at], normal, scale[at], self.gain, dx[at], dgain)
        return dx.reshape(dy.shape), dgain

    def backward_weight(self, pending):
        np.add(self.gain_grad, pending, out=self.gain_grad)


class LayerNorm(Layer):
    """y = gain * (x - mean) / sqrt(variance + eps) + bias (Ba, Kiros and Hinton, "Layer normalization", 2016).

    The backward is that of RMSNorm with n = (x - mean) * r, and mean(gain * dy) taken off as well.
    """

    gain: np.ndarray
    gain_grad: np.ndarray
    bias: np.ndarray
    bias_grad: np.ndarray

    def __init__(self, dim: int, eps: float = 1e-5):
        check_positive(dim=dim)
        self.dim, self.eps = dim, eps
        self.declared = {
            "gain": Parameter((dim,), ones, decay=False),
            "bias": Parameter((dim,), zeros, decay=False),
        }

    def forward(self, x):
        check_features(self, x, self.dim)
        flat = rows(x)
        y = np.empty(flat.shape, flat.dtype)
        scale = np.empty((len(flat), 1), flat.dtype)
        for at in blocks(*flat.shape):
            out = _centred(flat[at], y[at])
            _inverse_root(out, self.eps, scale[at])
            np.multiply(out, scale[at], out=out)
            np.multiply(out, self.gain, out=out)
            np.add(out, self.bias, out=out)
        return y.reshape(x.shape), (flat, scale)

    def backward_input(self, dy, saved):
        x, scale = saved
        dflat = rows(dy)
        dx = np.empty_like(x)
        dgain, dbias = np.zeros_like(self.gain), np.zeros_like(self.bias)
        for at in blocks(*x.shape):
            part = dflat[at]
            normal = _centred(x[at], np.empty(part.shape, part.dtype))
            np.multiply(normal, scale[at], out=normal)
            mean = np.matmul(part, self.gain)
            np.divide(mean, self.dim, out=mean)
            np.multiply(mean, scale[at, 0], out=mean)
            _backward_block(part, normal, scale[at], self.gain, dx[at], dgain)
            np.subtract(dx[at], mean[:, None], out=dx[at])
            np.add(dbias, np.add.reduce(part, 0), out=dbias)
        return dx.reshape(dy.shape), (dgain, dbias)

    def backward_weight(self, pending):
        dgain, dbias = pending
        np.add(self.gain_grad, dgain, out=self.gain_grad)
        np.add(self.bias_grad, dbias, out=self.bias_grad)


def _inverse_root(x, eps, out):
    """out = 1 / sqrt(mean(x^2) + eps) of each row of x; out has shape (rows, 1)."""
    square = np.vecdot(x, x)
    np.divide(square, x.shape[1], out=square)
    np.add(square, eps, out=square)
    np.sqrt(square, out=square)
    np.reciprocal(square, out=out[:, 0])


def _centred(x, out):
    mean = np.add.reduce(x, 1, keepdims=True)
    np.divide(mean, x.shape[1], out=mean)
    return np.subtract(x, mean, out=out)


def _backward_block(dy, normal, scale, gain, dx, dgain):
    """dx = r * (gain * dy - n * mean(gain * dy * n)); dgain += sum over rows of dy * n. Overwrites `normal`."""
    product = np.multiply(dy, normal)
    np.add(dgain, np.add.reduce(product, 0), out=dgain)
    mean = np.matmul(product, gain)
    np.divide(mean, len(gain), out=mean)
    np.multiply(normal, mean[:, None], out=normal)
    np.multiply(dy, gain, out=dx)
    np.subtract(dx, normal, out=dx)
    np.multiply(dx, scale, out=dx)
