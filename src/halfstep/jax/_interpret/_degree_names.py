"""Which operations treat the degrees of their operands alike."""

from halfstep.jax._primitives import true_p

JOINED = "add add_any sub max min rem clamp concatenate pad complex"
KEPT = """
    neg abs real imag conj broadcast_in_dim reshape transpose squeeze expand_dims rev slice
    dynamic_slice gather split tile copy copy_p name stop_gradient sharding_constraint
    layout_constraint reduce_sum reduce_max reduce_min cumsum cummax cummin
    reduce_window_sum reduce_window_max reduce_window_min fft
"""
EACH = """
    psum psum_invariant pmax pmin all_gather all_gather_invariant all_to_all ppermute
    reduce_scatter pvary pcast optimization_barrier device_put
"""
MULTIPLIED = "mul dot_general conv_general_dilated ragged_dot_general"
COMPARED = "eq ne lt le gt ge eq_to lt_to le_to sign is_finite atan2 argmax argmin"
CALLED = f"""
    jit pjit closed_call core_call remat2 checkpoint remat custom_jvp_call custom_vjp_call
    shard_map custom_partitioning {true_p.name}
"""
# Nothing is known of what is inside, and the backward of a kernel is a derivative.
OPAQUE = """
    pallas_call mpmd_map ffi_call pure_callback tpu_custom_call triton_kernel_call
    dot_product_attention_bwd dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd
"""
OBSERVING = "debug_print debug_callback io_callback"
