"""Pure tensor mathematics of flow-matching samplers.

Notation: `x_t = (1 - t) x0 + t eps`, model velocity `v = eps - x0`, sigmas fall from 1 to 0,
`dt = sigma_next - sigma < 0`.
Transition maths runs in float32 (float64 if the input is), whatever the dtype of the model.
"""
