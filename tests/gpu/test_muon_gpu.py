"""Newton-Schulz of Muon on a GPU: the error of its first steps in FP8, in both frameworks."""

import numpy as np
import pytest

from support.newton_schulz import COEFFICIENTS, assert_near_float64, draw_matrices

SHAPES = [(256, 512), (512, 256), (3, 256, 512), (3, 512, 256)]


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped products", "a product for each matrix"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pytorch(shape, grouped):
    torch = pytest.importorskip("torch")
    from qshard.torch_bridge._optim.newton_schulz import newton_schulz
    from qshard.torch_bridge._quantized.target_gpu import multiply_for, target_of

    x, target = draw_matrices(shape), target_of(torch.device("cuda", 0))
    if not grouped:
        target = target._replace(gpu=target.gpu._replace(grouped_cublaslt=0))
    on_gpu = torch.tensor(x, device="cuda").bfloat16()
    with multiply_for(target):
        for fp8_steps in (0, 3):
            found = newton_schulz(on_gpu, COEFFICIENTS, 5, 1e-7, fp8_steps, fp8_min_side=256)
            assert_near_float64(found.float().cpu().numpy(), x, fp8_steps)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_jax(shape):
    jax = pytest.importorskip("jax")
    from qshard.jax._optim.newton_schulz import NewtonSchulz

    x = draw_matrices(shape)
    with jax.default_device(jax.devices("cuda")[0]):  # The default of tests is the CPU.
        for fp8_steps in (0, 3):
            newton_schulz = NewtonSchulz(COEFFICIENTS, 5, 1e-8, fp8_steps, fp8_min_side=256)
            found = newton_schulz(jax.numpy.asarray(x, jax.numpy.bfloat16))
            assert_near_float64(np.asarray(found, np.float32), x, fp8_steps)
