"""The parts of the gradient scaler.

`_scale_cell` holds the scale on its device, `_outputs` multiplies losses by it, `_gradients` checks
and divides gradients, `_iteration` knows which call may follow which, `_modes` puts these together
for one optimizer step, and `_steps` and `_records` say afterwards what happened.
"""
