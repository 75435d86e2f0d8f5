"""`convert`: quantization of the linear layers of flax nnx models.

The modules that convert puts into layers, `qshard.jax.nnx` and `qshard.jax.linen`, are public and outside of this
package.
"""
