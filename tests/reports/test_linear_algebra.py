"""Linear algebra, Fourier transforms and complex numbers after a product in half."""

import pytest
import torch
import torch.nn.functional as F

from tests.reports.agreement import distances, through_linear


def _square(h):
    return h.T @ h + torch.eye(8) * 5


L = torch.linalg
ALGEBRA = {
    "inv": lambda h: L.inv(_square(h)),
    "inverse": lambda h: _square(h).inverse(),
    "inv_ex": lambda h: L.inv_ex(_square(h))[0],
    "solve": lambda h: L.solve(_square(h), torch.ones(8, 2)),
    "solve with a half right side": lambda h: L.solve(_square(h), h.T),
    "lstsq": lambda h: L.lstsq(_square(h), torch.ones(8, 2))[0],
    "cholesky": lambda h: L.cholesky(_square(h)),
    "cholesky_ex": lambda h: L.cholesky_ex(_square(h))[0],
    "cholesky_solve": lambda h: torch.cholesky_solve(torch.ones(8, 2), L.cholesky(_square(h))),
    "cholesky_inverse": lambda h: torch.cholesky_inverse(L.cholesky(_square(h))),
    "eigh": lambda h: L.eigh(_square(h))[0],
    "eigvalsh": lambda h: L.eigvalsh(_square(h)),
    "eigvals": lambda h: L.eigvals(_square(h)).abs().sort()[0],
    "svd": lambda h: L.svd(h)[1],
    "svdvals": lambda h: L.svdvals(h),
    "torch.svd": lambda h: torch.svd(h)[1],
    "pca_lowrank": lambda h: torch.pca_lowrank(h, q=3)[1],
    "svd_lowrank": lambda h: torch.svd_lowrank(h, q=3)[1],
    "qr": lambda h: L.qr(_square(h))[1],
    "det": lambda h: L.det(_square(h) / 8),
    "torch.det": lambda h: torch.det(_square(h) / 8),
    "logdet": lambda h: torch.logdet(_square(h)),
    "slogdet": lambda h: torch.slogdet(_square(h))[1],
    "pinv": lambda h: L.pinv(_square(h)),
    "pinverse": lambda h: torch.pinverse(_square(h)),
    "matrix_exp": lambda h: torch.matrix_exp(_square(h) / 8),
    "matrix_power": lambda h: torch.matrix_power(_square(h) / 8, 3),
    "matrix_power below zero": lambda h: L.matrix_power(_square(h), -2),
    "lu": lambda h: L.lu(_square(h))[2],
    "lu_factor": lambda h: L.lu_factor(_square(h))[0],
    "lu_solve": lambda h: L.lu_solve(*L.lu_factor(_square(h)), torch.ones(8, 2)),
    "solve_triangular": lambda h: L.solve_triangular(_square(h), torch.ones(8, 2), upper=True),
    "solve_triangular of half": lambda h: L.solve_triangular(5 * torch.eye(8), h.T, upper=True),
    "matrix_rank": lambda h: L.matrix_rank(_square(h)),
    "cond": lambda h: L.cond(_square(h)),
    "tensorinv": lambda h: L.tensorinv(_square(h).reshape(2, 4, 8)),
    "tensorsolve": lambda h: L.tensorsolve(_square(h), torch.ones(8)),
    "vander": lambda h: L.vander(h[0], N=3),
    "norm of order 2": lambda h: L.norm(h, 2),
    "nuclear norm": lambda h: L.norm(h, "nuc"),
    "Frobenius norm": lambda h: h.norm("fro"),
    "lobpcg": lambda h: torch.lobpcg(_square(h), k=1, X=torch.ones(8, 1))[0],
    "cov": lambda h: torch.cov(h),
    "corrcoef": lambda h: torch.corrcoef(h),
    "trace": lambda h: torch.trace(h),
}


@pytest.mark.parametrize("operation", ALGEBRA)
def test_linear_algebra_works_after_a_half_product(operation, low):
    """ "linalg_inv" not implemented for 'Half', right after a matrix product under autocast."""
    assert max(distances(through_linear(ALGEBRA[operation]), low)) < 0.1


FOURIER = [
    "fft",
    "ifft",
    "rfft",
    "irfft",
    "hfft",
    "ihfft",
    "fft2",
    "ifft2",
    "rfft2",
    "irfft2",
    "hfft2",
    "ihfft2",
    "fftn",
    "ifftn",
    "rfftn",
    "irfftn",
    "hfftn",
    "ihfftn",
    "fftshift",
    "ifftshift",
]


@pytest.mark.parametrize("name", FOURIER)
def test_fourier_transforms_work_after_a_half_layer(name, low):
    """cuFFT only supports dimensions whose sizes are powers of two in half precision."""
    transform = getattr(torch.fft, name)
    assert max(distances(through_linear(transform), low)) < 0.05


def _roots():
    return torch.polar(torch.ones(6, 4), torch.arange(24.0).reshape(6, 4))


def _spectral(h):
    """One layer of a Fourier neural operator."""
    weights = torch.ones(5, 5, dtype=torch.complex64) * (0.5 + 0.1j)
    return torch.fft.irfft(torch.einsum("bi,io->bo", torch.fft.rfft(h), weights), n=8) + h


COMPLEX = {
    "spectral layer": _spectral,
    "complex @ complex": lambda h: torch.fft.irfft(
        torch.fft.rfft(h) @ torch.ones(5, 5, dtype=torch.complex64), n=8
    ),
    "complex * half": lambda h: torch.fft.fft(h) * h,
    "complex(half, half)": lambda h: torch.complex(h, h).abs(),
    "complex(half, float32)": lambda h: torch.complex(h, torch.ones(6, 8)).abs(),
    "polar": lambda h: torch.polar(h.abs(), torch.ones(6, 8)).real,
    "rotary": lambda h: torch.view_as_real(
        torch.view_as_complex(h.reshape(6, 4, 2)) * _roots()
    ).flatten(-2),
    "rotary in float32": lambda h: (
        torch.view_as_real(torch.view_as_complex(h.float().reshape(6, 4, 2)) * _roots())
        .flatten(-2)
        .type_as(h)
    ),
    "exp(1j * half)": lambda h: torch.exp(1j * h).real,
    "sum": lambda h: torch.fft.fft(h).sum().abs(),
    "stft": lambda h: torch.stft(
        h.flatten(), 8, window=torch.hann_window(8), return_complex=True
    ).abs(),
    "stft with a half window": lambda h: torch.stft(
        h.flatten(), 8, window=torch.hann_window(8).to(h.dtype), return_complex=True
    ).abs(),
    "istft": lambda h: torch.istft(
        torch.stft(h.flatten(), 8, window=torch.hann_window(8), return_complex=True),
        8,
        window=torch.hann_window(8),
    ),
    "complex linear": lambda h: F.linear(
        torch.fft.fft(h), torch.ones(3, 8, dtype=torch.complex64)
    ).abs(),
    "complex conv": lambda h: F.conv1d(
        torch.fft.fft(h)[:, None], torch.ones(2, 1, 3, dtype=torch.complex64)
    ).abs(),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("operation", COMPLEX)
def test_complex_numbers_work_after_a_half_layer(operation, low):
    """A spectral model fails under autocast, since there is no complex number of two bfloat16."""
    assert max(distances(through_linear(COMPLEX[operation]), low)) < 0.05
