"""Published updates of a loss scale, written from their sources in plain Python and float32."""

from __future__ import annotations

import numpy as np

f32 = np.float32


def tensorflow(scale, every, decr_every, incr, decr, pattern):
    """ExponentialUpdateLossScaleManager.update_loss_scale of tf.contrib.mixed_precision, TensorFlow 1.15, in float32."""
    scale, good, bad = f32(scale), 0, 0
    for bad_step in pattern:
        with np.errstate(over="ignore"):
            if not bad_step:
                if good + 1 >= every:
                    scale = (
                        scale * f32(incr) if np.isfinite(scale * f32(incr)) else scale
                    )
                    good = bad = 0
                else:
                    good += 1
            elif bad + 1 >= decr_every:
                scale = max(f32(1), scale * f32(decr))
                good = bad = 0
            else:
                bad += 1
                good = 0
        yield float(scale), good, bad


def paddle(scale, every, decr_every, incr, decr, pattern):
    """The operator update_loss_scaling of PaddlePaddle (phi/kernels/impl/amp_kernel_impl.h) in float32."""
    scale, good, bad = f32(scale), 0, 0
    for bad_step in pattern:
        with np.errstate(over="ignore"):
            if bad_step:
                good, bad = 0, bad + 1
                if bad == decr_every:
                    scale, bad = max(f32(1), scale * f32(decr)), 0
            else:
                bad, good = 0, good + 1
                if good == every:
                    scale, good = (
                        scale * f32(incr) if np.isfinite(scale * f32(incr)) else scale,
                        0,
                    )
        yield float(scale), good, bad
