"""Fits the rationals of `sigmoid.rs`: x P(x²) / Q(x²) nearest to an odd function on [-c, c], in the largest absolute error.

Needs NumPy and SciPy; prints the error and the coefficients, the highest first, by the degrees below. Sums of squares of the
linearised error, weighted by the last denominator (Sanathanan and Koerner 1963) and by how far off each point is (Lawson 1961).
"""

import numpy as np
from numpy.polynomial import chebyshev, polynomial
from scipy.special import erf

SCALE = np.sqrt(2 / np.pi)


def phi(x):
    return erf(x / np.sqrt(2)) / 2


def phi_slope(x):
    return phi(x) + x * np.exp(-x * x / 2) / np.sqrt(2 * np.pi)


def tanh(x):
    return np.tanh(SCALE * (x + 0.044715 * x**3)) / 2


def tanh_slope(x):
    t = 2 * tanh(x)
    return t / 2 + x / 2 * (1 - t * t) * SCALE * (1 + 3 * 0.044715 * x * x)


def fitted(function, c, over, under, rounds=400, points=3000):
    """The error, and the coefficients of P and Q; Q(0) is 1."""
    x = c * np.sin(np.linspace(0, np.pi / 2, points + 1)[1:])
    z, y = 2 * (x / c) ** 2 - 1, function(x)
    basis = [chebyshev.chebvander(z, degree) for degree in (over, under)]
    weight, q = np.ones(points), np.ones(points)
    best = (np.inf, None, None)
    for _ in range(rounds):
        system = np.hstack([basis[0] * x[:, None], -y[:, None] * basis[1]])
        system *= (np.sqrt(weight) / np.maximum(np.abs(q), 1e-12))[:, None]
        scale = np.linalg.norm(system, axis=0)
        solution = np.linalg.svd(system / scale, full_matrices=False)[2][-1] / scale
        q = basis[1] @ solution[over + 1 :]
        solution, q = solution / q[np.abs(q).argmax()], q / q[np.abs(q).argmax()]
        error = np.abs(basis[0] @ solution[: over + 1] * x / q - y)
        if (q > 0).all() and error.max() < best[0]:
            best = (error.max(), solution[: over + 1], solution[over + 1 :])
        weight *= error / error.max() + 1e-3
        weight /= weight.mean()
    return best[0], *(in_squares(part, c) / in_squares(best[2], c)[0] for part in best[1:])


def in_squares(coefficients, c):
    """Chebyshev's polynomials of 2 (x/c)² - 1 as powers of x²."""
    total, power = np.zeros(1), np.ones(1)
    for coefficient in chebyshev.cheb2poly(coefficients):
        total = polynomial.polyadd(total, coefficient * power)
        power = polynomial.polymul(power, [-1.0, 2 / c**2])
    return total


if __name__ == "__main__":
    for function, c, over, under in [(phi, 5.4, 5, 5), (phi_slope, 6.0, 7, 6), (tanh, 5.0, 5, 5), (tanh_slope, 5.8, 7, 6)]:
        error, p, q = fitted(function, c, over, under)
        print(f"{function.__name__} to {c}: {error:.1e}")
        for part in p, q:
            print("    " + ", ".join(f"{x:.8e}" for x in part[::-1]))
