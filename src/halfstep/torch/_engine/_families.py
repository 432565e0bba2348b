"""Which family each PyTorch operation belongs to: one table, read by everything else.

A name stands for all functional overloads of `aten::name`; names that end in an underscore are the
in-place forms, which are listed only where mixed dtypes make them fail.
"""

_LISTS: dict[str, str] = {
    "matmul": """
        mm bmm addmm addmv mv addr addbmm baddbmm matmul linear einsum chain_matmul inner ger outer
        linalg_multi_dot linalg_vecdot _addmm_activation addmm_ addmv_ addbmm_ baddbmm_ addr_
    """,
    "convolution": """
        conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
    """,
    "attention": """
        scaled_dot_product_attention _scaled_dot_product_flash_attention
        _native_multi_head_attention _transformer_encoder_layer_fwd
    """,
    "recurrent": """
        lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
        _thnn_fused_lstm_cell _thnn_fused_gru_cell mkldnn_rnn_layer
    """,
    "normalisation": """
        layer_norm native_layer_norm rms_norm group_norm batch_norm instance_norm
    """,
    "softmax": "softmax",
    "embedding": "embedding",
    "pooling": """
        avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d
        max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
        adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
        adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
        fractional_max_pool2d fractional_max_pool3d max_unpool2d max_unpool3d
    """,
    "interpolation": """
        upsample_nearest1d upsample_nearest2d upsample_nearest3d
        _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
        upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
        upsample_bicubic2d _upsample_bicubic2d_aa
    """,
    "masking": """
        masked_fill masked_fill_ fill fill_ index_fill index_fill_ full full_like new_full
        constant_pad_nd clamp clamp_ where threshold threshold_ hardshrink
    """,
    "reduction": """
        sum nansum mean nanmean prod cumsum cumprod logcumsumexp logsumexp trace
        var std var_mean std_mean norm frobenius_norm nuclear_norm
        linalg_norm linalg_vector_norm linalg_matrix_norm dist cdist pdist renorm
        cosine_similarity pairwise_distance quantile nanquantile cov corrcoef trapezoid
        cumulative_trapezoid histc histogram histogramdd
    """,
    "exponential": """
        exp exp2 expm1 log log2 log10 log1p logaddexp logaddexp2 xlogy special_xlog1py
        pow float_power square rsqrt reciprocal sinh cosh tan acos asin acosh asinh atanh
        erfinv erfc lgamma digamma polygamma mvlgamma softplus i0 special_entr special_erfcx
        special_i0e special_i1 special_i1e special_log_ndtr special_ndtri special_zeta logit
        special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
        special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
        special_modified_bessel_k1 special_scaled_modified_bessel_k0
        special_scaled_modified_bessel_k1 special_spherical_bessel_j0
        special_chebyshev_polynomial_t special_chebyshev_polynomial_u
        special_chebyshev_polynomial_v special_chebyshev_polynomial_w
        special_hermite_polynomial_h special_hermite_polynomial_he
        special_laguerre_polynomial_l special_legendre_polynomial_p
        special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
        special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w polar
    """,
    "loss": """
        log_softmax nll_loss nll_loss2d nll_loss_nd cross_entropy_loss kl_div l1_loss mse_loss
        smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits
        poisson_nll_loss cosine_embedding_loss hinge_embedding_loss margin_ranking_loss
        multilabel_margin_loss multilabel_margin_loss_forward multi_margin_loss soft_margin_loss
        triplet_margin_loss ctc_loss
    """,
    "linear_algebra": """
        cholesky cholesky_inverse cholesky_solve inverse pinverse det logdet slogdet qr svd
        geqrf orgqr ormqr lu_solve lu_unpack _lu_with_info triangular_solve matrix_exp matrix_power
        linalg_cholesky linalg_cholesky_ex linalg_cond linalg_det linalg_eig linalg_eigh
        linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex
        linalg_ldl_factor linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu
        linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp
        linalg_matrix_power linalg_matrix_rank linalg_pinv linalg_qr linalg_slogdet linalg_solve
        linalg_solve_ex linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv
        linalg_tensorsolve linalg_vander
    """,
    "fourier": """
        fft_fft fft_fft2 fft_fftn fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn
        fft_ihfft fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2
        fft_rfftn stft istft
    """,
    "pointwise": """
        addcdiv addcmul addcdiv_ addcmul_ lerp lerp_ atan2 hypot nextafter cross linalg_cross dot
        vdot tensordot bilinear grid_sampler grid_sampler_2d grid_sampler_3d prelu cat stack
        heaviside embedding_bag block_diag kron cartesian_prod meshgrid bucketize searchsorted
        isclose allclose equal
    """,
    "indexing": """
        index_put index_put_ index_add index_add_ index_copy index_copy_ index_reduce
        index_reduce_ scatter scatter_ scatter_add scatter_add_ scatter_reduce
        scatter_reduce_ masked_scatter masked_scatter_ put put_ select_scatter slice_scatter
        diagonal_scatter
    """,
}

FAMILY_OF: dict[str, str] = {
    f"aten::{name}": family for family, names in _LISTS.items() for name in names.split()
}
