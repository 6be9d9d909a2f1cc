#!/usr/bin/env python3
"""Fits the polynomials of crates/voltaic/src/kernels/math.rs. Needs numpy and mpmath."""

import mpmath as mp
import numpy as np

mp.mp.dps = 40


def minimax(f, to_t, low, high, degree):
    """Coefficients, lowest first, of a polynomial in t with the least relative error, and that error."""
    nodes = np.cos(np.pi * (np.arange(400) + 0.5) / 400)
    t = (low + high) / 2 + (high - low) / 2 * nodes
    y = np.array([float(f(to_t(x))) for x in t])
    powers, weight = np.vander(t, degree + 1, increasing=True), np.ones(len(t))
    best = None
    for _ in range(200):  # Lawson's iteration: least squares with weights that grow where the error is large
        scale = weight / y
        c = np.linalg.lstsq(powers * scale[:, None], y * scale, rcond=None)[0]
        error = np.abs((powers @ c - y) / y)
        if best is None or error.max() < best[1]:
            best = (c, error.max())
        weight *= (error / error.max() + 1e-3) ** 0.5
        weight /= weight.mean()
    return best


def show(name, fit):
    print(f"{name}: relative error {fit[1]:.1e}")
    print("    " + ", ".join(f"{c:.10e}" for c in fit[0]))


def tail_ratio(a):
    """Phi(-a) / exp(-a^2 / 2)."""
    return mp.erfc(mp.mpf(a) / mp.sqrt(2)) / 2 * mp.e ** (mp.mpf(a) ** 2 / 2)


P = 0.3
show("tail ratio in 1 / (1 + 0.3 a)", minimax(tail_ratio, lambda t: (1 / t - 1) / P, 1 / (1 + P * 13.5), 1.0, 8))
half = float(mp.log(2)) / 2
show("exp", minimax(mp.exp, lambda t: t, -half, half, 6))
