"""What each operator is: the one table that every room asks.

    facts("softmax").kind                  what kind of operator it is
    facts("mm").multiplies                 one question about one operator
    operators_that("move values")          all operators with a trait

An operator has up to two names, and both stand here. Its *site* name is torch's, as the
user's code calls it (``getitem``, ``layer_norm``); its *kernel* names are aten's
packets, as ``__torch_dispatch__`` sees them (``slice``, ``native_layer_norm``). Where
the two are spelled alike, they are one operator. Names have no underscore of an
in-place form, no overload and no ``_foreach_`` (see ``base``). ``gradient`` is the name
that a recording gives to a gradient.

What torch.autocast does with an operator is read from torch (``listed``); the names in
other tools stand beside this table (``foreign_names``). This module imports no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal[
    "linear",
    "matmul",
    "conv",
    "attention",
    "rnn",
    "embedding",
    "normalization",
    "softmax",
    "reduction",
    "elementwise",
]

#: The kinds that multiply and accumulate: most of the work of a network.
MULTIPLYING_KINDS: tuple[Kind, ...] = ("conv", "linear", "matmul", "attention", "rnn")
#: The kinds that a format limited to "matrix" operators can run: an embedding looks up
#: rows of such a format, without multiplying.
MATRIX_KINDS: frozenset[Kind] = frozenset((*MULTIPLYING_KINDS, "embedding"))
#: The kinds whose result is linear in each operand.
LINEAR_KINDS: frozenset[Kind] = frozenset(("linear", "conv", "matmul"))

Trait = Literal[
    # the values of the result
    "keep values",
    "cast",
    "copy in",
    "reshape",
    "permute axes",
    "expand",
    "repeat",
    "reorder",
    "cut out",
    "join",
    "fill",
    "write into",
    "pad",
    "store or add",
    "sort",
    "drop out",
    "repack",
    "look up",
    "read at places",
    "choose values",
    "compute exactly",
    "move values",
    "hand on in order",
    "change no value",
    "add no error",
    "round nothing",
    "are often exact",
    # what is read
    "create",
    "create exactly",
    "draw",
    "leave memory unwritten",
    "leave a further result unwritten in part",
    "ignore their first operand",
    "write constants",
    "ask about values",
    "take out or ask",
    "describe tensors",
    "give numbers to Python",
    # where no derivative follows
    "jump",
    "cut the gradient",
    "hand the gradient on without a call",
    "keep their result for the gradient",
    # arithmetic
    "say which is larger",
    "multiply",
    "multiply two matrices",
    "run along a sequence",
    "run on matrix units",
    "sum",
    "add or subtract",
    "normalize",
    "scale elements",
    "unscale gradients",
    "divide",
    "divide in a gradient",
    "take roots",
    "take logarithms",
    "exponentiate",
    "grow with their argument",
    "take moments",
    "add up terms",
    "add up a gradient in further results",
    "average targets",
    "clamp",
    "hand on in decompositions",
    "work element by element",
    "activate",
    "turn one spread into another",
    "pair elements",
    "keep a common factor",
    "scale with their operand",
    "reduce axes",
    # how it runs
    "act on the program",
    "read strides",
    "have no unique result",
    "read opaque bytes",
    "return a workspace",
    "write running statistics",
    "vary on CUDA",
    "promote under autocast",
    "mix formats",
    "wrap one operator",
    "hide from compiled modes",
    "clip codes",
    "join or pool codes",
    "hand codes on",
    "multiply by their sigmoid",
    "stand before attention's softmax",
    # what may be run because a file says so
    "are safe from a recording",
]

_TRAITS: dict[Trait, str] = {
    "say which is larger": "ge gt le lt",
    # -- moving values: each operator in the first of these that fits
    # every element at its place, in its format
    "keep values": """
        contiguous clone detach detach_copy deepcopy alias identity cpu cuda real data
        requires_grad requires_grad_ resolve_conj resolve_neg lift lift_fresh
        lift_fresh_copy gradient""",
    # every element at its place, maybe in another format
    "cast": "to _to_copy type_as type float double half bfloat16",
    # values of one tensor into the memory, and the format, of another
    "copy in": "copy",
    # every element in its order, over other axes
    "reshape": """
        view reshape flatten unflatten ravel squeeze squeeze_copy unsqueeze view_as
        reshape_as atleast_1d atleast_2d atleast_3d _unsafe_view _reshape_alias
        _reshape_copy""",
    "permute axes": "transpose permute swapaxes swapdims movedim moveaxis T mT H mH adjoint t",
    "expand": "expand expand_as broadcast_to broadcast_tensors",
    "repeat": "repeat repeat_interleave tile meshgrid unfold im2col",
    "reorder": """
        roll flip fliplr flipud rot90 pixel_shuffle pixel_unshuffle channel_shuffle
        native_channel_shuffle""",
    # some of the elements
    "cut out": """
        getitem slice narrow select index_select index gather take take_along_dim chunk
        unsafe_chunk split split_with_sizes tensor_split unsafe_split
        unsafe_split_with_sizes unbind as_strided diagonal diag masked_select
        _unsafe_index _unsafe_masked_index""",
    "join": "cat concat concatenate stack hstack vstack dstack _chunk_cat",
    # a tensor with some elements replaced where they stand
    "fill": "masked_fill masked_scatter index_fill fill tril triu",
    # a larger tensor, or one of several, with values of each at their places
    "write into": """
        setitem where index_copy zero pad constant_pad_nd block_diag diag_embed
        slice_scatter select_scatter diagonal_scatter""",
    # a larger tensor with the values inside
    "pad": """
        pad constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d
        replication_pad1d replication_pad2d replication_pad3d""",
    # the same, or a sum where an argument says so (``stores_unless``)
    "store or add": "index_put _index_put_impl put scatter",
    # in the order of the values
    "sort": "sort topk kthvalue",
    # a copy in evaluation; random, and scaled, in training
    "drop out": """
        dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout
        feature_alpha_dropout native_dropout""",
    # into another container, or a question about one
    "repack": """
        set nested_tensor to_padded_tensor is_nonzero _pack_padded_sequence
        _pad_packed_sequence""",
    # -- exact, but not moving
    "look up": "embedding",
    # and where an index says which, of any tensor
    "read at places": "embedding index_select index gather take",
    # each result is one of the operand's values, and moves no further than they do
    "choose values": """
        relu max_pool1d max_pool1d_with_indices max_pool2d
        max_pool2d_with_indices max_pool3d max_pool3d_with_indices mkldnn_max_pool2d
        mkldnn_max_pool3d adaptive_max_pool2d adaptive_max_pool3d
        fractional_max_pool2d fractional_max_pool3d reflection_pad1d reflection_pad2d
        reflection_pad3d replication_pad1d replication_pad2d replication_pad3d""",
    # each result is an operand, its magnitude, sign or whole part, or a constant
    "compute exactly": """
        abs amax amin aminmax ceil clamp clamp_max clamp_min clip complex copysign
        cummax cummin diagonal_backward eq fix floor fmax fmin fmod frac frexp
        full_like ge gt hardtanh hardtanh_backward heaviside le logical_and logical_not
        logical_or logical_xor lt masked_scatter_backward max max_unpool2d max_unpool3d
        maximum median min minimum mode nan_to_num nanmedian ne neg new_full new_ones
        new_zeros nextafter ones_like round select_backward sgn sign slice_backward
        threshold threshold_backward trunc unique_consecutive unique_dim zeros_like
        _amp_update_scale _conj_physical _copy_from _unique _unique2""",
    # exact for many elements: masks, counts, powers of two
    "are often exact": """
        add sub rsub mul div true_divide square sum native_dropout_backward copy
        _amp_foreach_non_finite_check_and_unscale""",
    # -- what is read of the operands
    # their values do not matter
    "create": """
        zeros ones full empty arange linspace logspace eye tensor as_tensor from_numpy
        zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty
        new_tensor scalar_tensor empty_strided tril_indices triu_indices complex
        asarray""",
    # and the result is exact in every format
    "create exactly": """
        zeros ones eye empty zeros_like ones_like empty_like new_zeros new_ones
        new_empty empty_strided""",
    # random numbers: running one again gives another result
    "draw": """
        rand randn randint randperm rand_like randn_like randint_like bernoulli
        multinomial normal uniform random exponential geometric cauchy log_normal rrelu
        poisson""",
    "leave memory unwritten": """
        empty empty_like empty_strided empty_permuted empty_quantized new_empty
        new_empty_strided resize resize_as _resize_output""",
    # steps of the recursion beyond the lengths of a sample
    "leave a further result unwritten in part": "_ctc_loss",
    "ignore their first operand": """
        zeros_like ones_like empty_like full_like rand_like randn_like randint_like
        new_zeros new_empty new_full new_ones new_empty_strided zero fill copy normal
        uniform bernoulli exponential random resize set log_normal geometric cauchy
        zero_tensor""",
    # only move values or write a constant: an -inf after finite operands was asked for
    "write constants": """
        masked_fill where full full_like new_full fill triu tril masked_scatter scatter
        index_put index_fill scalar_tensor lift_fresh lift_fresh_copy constant_pad_nd
        index_copy slice_scatter select_scatter""",
    "ask about values": """
        isfinite isnan isinf isneginf isposinf _is_all_true _local_scalar_dense
        is_nonzero equal""",
    # answered from the shape or for Python: no site
    "describe tensors": "shape dim size numel stride item tolist is_contiguous",
    # the program goes on by the values
    "give numbers to Python": """
        item tolist numpy is_nonzero equal allclose bool int float complex index
        contains""",
    # the derivative is zero, or misses that the result jumps
    "jump": """
        ceil floor round trunc fix sign sgn heaviside frac fmod remainder floor_divide
        copysign hardshrink threshold fake_quantize_per_tensor_affine
        fake_quantize_per_channel_affine""",
    # the values go on, the gradient does not come back
    "cut the gradient": "detach data detach_copy",
    # their derivative is one: nothing runs for it
    "hand the gradient on without a call": """
        add sub clone contiguous _to_copy alias lift_fresh""",
    # autograd keeps a detached result: 'result' stands in their line of torch's
    # derivatives.yaml
    "keep their result for the gradient": """
        _softmax _safe_softmax _log_softmax logsumexp logcumsumexp exp exp2 expm1 sigmoid
        tanh tan sqrt rsqrt reciprocal pow relu elu celu amax amin max min median prod
        cumprod norm linalg_vector_norm std polar hypot _cdist_forward _euclidean_dist
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
        _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
        _flash_attention_forward _efficient_attention_forward mkldnn_rnn_layer
        _cudnn_rnn""",
    # -- arithmetic
    # multiply and accumulate, beside the operators with operands of such a kind
    "multiply": """
        addmv addr inner vdot tensordot chain_matmul linalg_multi_dot
        linalg_matmul linalg_vecdot einsum convolution _convolution
        convolution_backward conv_tbc cudnn_convolution cudnn_convolution_transpose
        mkldnn_convolution thnn_conv2d slow_conv3d mkldnn_linear _scaled_mm
        _addmm_activation _trilinear mkldnn_rnn_layer mkldnn_rnn_layer_backward
        _cudnn_rnn _thnn_fused_lstm_cell _thnn_fused_gru_cell
        _scaled_dot_product_attention_math _scaled_dot_product_flash_attention
        _scaled_dot_product_flash_attention_for_cpu
        _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
        _native_multi_head_attention multi_head_attention_forward""",
    "multiply two matrices": "matmul mm bmm addmm",
    # whole recurrent layers, not their cells
    "run along a sequence": "lstm gru rnn_tanh rnn_relu",
    # what lists for Ascend's cube unit and Transformer Engine's linear layers are
    # about: the sites that multiply, without recurrent layers and products of vectors
    "run on matrix units": """
        linear matmul mm bmm addmm baddbmm addbmm mv addmv einsum bilinear conv1d conv2d
        conv3d conv_transpose1d conv_transpose2d conv_transpose3d
        scaled_dot_product_attention""",
    # add elements of one tensor
    "sum": """
        sum mean cumsum embedding_dense_backward native_layer_norm_backward
        native_batch_norm_backward var std norm linalg_vector_norm index_add
        scatter_add logsumexp native_batch_norm native_group_norm""",
    # add terms, each linear in every operand: magnitudes for operands give magnitudes
    # for terms
    "add up terms": """
        sum mean cumsum embedding_dense_backward index_add scatter_add mm bmm addmm
        baddbmm addbmm mv addmv dot vdot matmul linear convolution
        convolution_backward""",
    # the gradients of parameters, beside that of what the layer works on
    "add up a gradient in further results": """
        convolution_backward native_batch_norm_backward native_layer_norm_backward
        native_group_norm_backward""",
    # add elements of several: what is near may cancel
    "add or subtract": "add sub rsub lerp addcmul addcdiv",
    "normalize": "native_layer_norm native_batch_norm native_group_norm _fused_rms_norm",
    # multiply element by element
    "scale elements": """
        mul _softmax_backward_data tanh_backward sigmoid_backward gelu_backward
        silu_backward""",
    "divide": "div divide true_divide reciprocal rsqrt addcdiv remainder fmod",
    # in the derivative of a root or a norm
    # gradients of a scaled loss are divided by its scale, in place
    "unscale gradients": "_amp_foreach_non_finite_check_and_unscale",
    "divide in a gradient": "div mul reciprocal pow",
    "take roots": "sqrt rsqrt linalg_vector_norm norm pow",
    "take logarithms": "log log2 log10 log1p xlogy",
    # pass the largest number for moderate operands
    "exponentiate": "exp exp2 expm1 cosh sinh logsumexp",
    # a relative error that is the operand's absolute one
    "grow with their argument": """
        exp exp2 expm1 cosh sinh logsumexp _softmax _log_softmax sigmoid sin cos""",
    # NaN of one element or none
    "take moments": "mean var std var_mean std_mean nanmean native_batch_norm native_layer_norm",
    "average targets": "nll_loss nll_loss_forward nll_loss2d_forward cross_entropy",
    "clamp": "clamp clip clamp_min clamp_max hardtanh relu6",
    # what torch's decompositions call one that changes no value
    "hand on in decompositions": """
        broadcast_in_dim convert_element_type view_of collapse_view split_dim
    """,
    # one operand, each element by itself
    "work element by element": """
        sigmoid tanh gelu silu mish elu selu celu hardswish hardsigmoid softplus
        softsign hardshrink softshrink tanhshrink logsigmoid log_sigmoid
        log_sigmoid_forward exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square pow
        rpow reciprocal erf sin cos floor ceil round trunc sign clamp clamp_min
        clamp_max clip hardtanh relu6 floor_divide""",
    # what layers put behind their products, of one tensor alone
    "activate": "sigmoid tanh relu gelu silu softplus hardsigmoid hardswish",
    # a variance becomes a deviation, its inverse, a logarithm, and back
    "turn one spread into another": "sqrt rsqrt square exp log",
    # two operands, each pair of elements by itself
    "pair elements": "add radd sub rsub mul rmul div rdiv maximum minimum",
    # f(s x, s y) = s f(x, y) for s > 0
    "keep a common factor": "add sub maximum minimum",
    # f(s x) = s f(x) for s > 0
    "scale with their operand": """
        relu leaky_relu prelu rrelu abs neg negative positive nan_to_num where
        threshold identity sum mean amax amin max min std norm linalg_vector_norm""",
    "reduce axes": """
        sum mean amax amin max min prod var std norm linalg_vector_norm logsumexp""",
    # -- how it runs
    # called for an effect, not for a value
    "act on the program": """
        record_stream _print _assert_async _assert_scalar set set_data
        _pin_memory pin_memory manual_seed _cudnn_init_dropout_state
        _fill_mem_eff_dropout_mask""",
    # their meaning hangs on the strides of the memory, which a copy does not keep
    "read strides": "as_strided_copy as_strided_scatter",
    # vectors up to sign, or any basis of a space: two correct results need not be close
    "have no unique result": "linalg_eig _linalg_eigh _linalg_svd",
    # bytes that the forward kernel of one format left for its backward kernel
    "read opaque bytes": "_cudnn_rnn_backward miopen_rnn_backward",
    # further results may be bytes
    "return a workspace": "mkldnn_rnn_layer _cudnn_rnn miopen_rnn cudnn_batch_norm",
    # arguments that the schema does not call written
    "write running statistics": "native_batch_norm cudnn_batch_norm miopen_batch_norm",
    # documented by torch.use_deterministic_algorithms, or adding with atomic operations
    "vary on CUDA": """
        index_add index_put _index_put_impl _unsafe_index_put put scatter scatter_add
        scatter_reduce index_reduce index_copy index_select_backward
        embedding_dense_backward embedding_backward _embedding_bag_dense_backward
        _embedding_bag cumsum bincount histc kthvalue median nanmedian gather_backward
        repeat_interleave _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward
        avg_pool3d_backward adaptive_max_pool2d_backward
        max_pool3d_with_indices_backward fractional_max_pool2d_backward max_unpool2d
        fractional_max_pool3d_backward max_unpool3d grid_sampler_2d_backward
        grid_sampler_3d_backward upsample_linear1d_backward
        upsample_bilinear2d_backward upsample_bicubic2d_backward
        upsample_trilinear3d_backward _upsample_bilinear2d_aa_backward
        reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
        replication_pad1d_backward replication_pad2d_backward
        replication_pad3d_backward nll_loss2d_forward nll_loss2d_backward
        _ctc_loss_backward _cudnn_ctc_loss _cdist_backward convolution_backward
        cudnn_convolution _cudnn_rnn _cudnn_rnn_backward _flash_attention_backward
        _efficient_attention_backward _scaled_dot_product_flash_attention_backward
        _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_cudnn_attention_backward""",
    # torch's AT_FORALL_PROMOTE: in the widest format of their operands
    "promote under autocast": """
        addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot
        scatter_add cat stack index_copy""",
    # kernels that bring operands of several formats to the widest, element by element
    "mix formats": "add sub rsub mul div rdiv",
    # Python functions of torch.nn.functional that call one operator
    "wrap one operator": """
        adaptive_avg_pool2d adaptive_avg_pool3d batch_norm binary_cross_entropy
        binary_cross_entropy_with_logits cdist celu einsum elu embedding embedding_bag
        glu group_norm hardsigmoid hardswish hardtanh huber_loss l1_loss layer_norm
        leaky_relu log_softmax mish mse_loss relu relu6 rms_norm selu silu
        smooth_l1_loss soft_margin_loss softmax cross_entropy nll_loss norm""",
    # torch.compile keeps these functions from modes, though eager code shows what they call
    "hide from compiled modes": "sigmoid tanh hardsigmoid hardswish",
    # an integer kernel of ONNX Runtime absorbs them: their result is quantized alone
    "clip codes": "relu relu6 hardtanh clamp clip clamp_min",
    # ONNX Runtime has integer kernels for them, between integer kernels
    "join or pool codes": """
        add mul mean adaptive_avg_pool2d avg_pool2d max_pool1d max_pool2d
        upsample_nearest1d upsample_nearest2d upsample_nearest3d
        _upsample_nearest_exact1d _upsample_nearest_exact2d
        _upsample_nearest_exact3d""",
    # each code of the result is one of those that they read
    "hand codes on": """
        max_pool1d max_pool2d max_pool3d upsample_nearest1d upsample_nearest2d
        upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
        _upsample_nearest_exact3d""",
    # x * sigmoid(x), which ONNX Runtime looks up and multiplies as codes
    "multiply by their sigmoid": "silu",
    # scaling, masks and position biases between the scores and their softmax
    "stand before attention's softmax": "mul div add sub where masked_fill clamp tanh",
    # -- what may be run because a file says so
    # tensors from tensors and nothing else: no file, no memory of others, no kernel of
    # the user's; they check what they are given, or ``sizes_like`` says what to check
    "are safe from a recording": """
        _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d
        _adaptive_avg_pool3d_backward _addmm_activation _aminmax
        _amp_foreach_non_finite_check_and_unscale _cdist_backward _cdist_forward
        _conj _conj_copy _conj_physical _ctc_loss _ctc_loss_backward
        _embedding_bag _embedding_bag_dense_backward _embedding_bag_forward_only
        _euclidean_dist _fft_c2c _fft_c2r _fft_r2c _fused_adagrad _fused_adam
        _fused_adamw _fused_rms_norm _fused_rms_norm_backward _fused_sgd
        _index_put_impl _linalg_det _linalg_eigh _linalg_slogdet
        _linalg_solve_ex _linalg_svd _log_softmax _log_softmax_backward_data
        _logcumsumexp _native_batch_norm_legit
        _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
        _neg_view _neg_view_copy _pack_padded_sequence _pdist_forward
        _prelu_kernel _prelu_kernel_backward _safe_softmax
        _scaled_dot_product_attention_math _scaled_dot_product_cudnn_attention
        _scaled_dot_product_cudnn_attention_backward
        _scaled_dot_product_efficient_attention
        _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_flash_attention
        _scaled_dot_product_flash_attention_backward
        _scaled_dot_product_flash_attention_for_cpu
        _scaled_dot_product_flash_attention_for_cpu_backward _softmax
        _softmax_backward_data _to_copy _trilinear _unique2 _unsafe_index
        _unsafe_index_put _unsafe_masked_index _unsafe_view
        _upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward
        _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward
        _upsample_lanczos2d_aa _upsample_lanczos2d_aa_backward
        _upsample_nearest_exact1d _upsample_nearest_exact1d_backward
        _upsample_nearest_exact2d _upsample_nearest_exact2d_backward
        _upsample_nearest_exact3d _upsample_nearest_exact3d_backward
        _weight_norm_interface _weight_norm_interface_backward abs absolute acos
        acosh adaptive_avg_pool1d adaptive_avg_pool2d
        adaptive_avg_pool3d_backward adaptive_max_pool2d
        adaptive_max_pool2d_backward adaptive_max_pool3d
        adaptive_max_pool3d_backward add addbmm addcdiv addcmul addmm addmv addr
        affine_grid_generator alias alias_copy all amax amin aminmax angle any
        arange arccos argmax argmin as_strided asin asinh atan atan2 atanh
        avg_pool1d avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward
        baddbmm bartlett_window batch_norm binary_cross_entropy
        binary_cross_entropy_backward binary_cross_entropy_with_logits bincount
        bitwise_and bitwise_left_shift bitwise_not bitwise_or
        bitwise_right_shift bitwise_xor blackman_window block_diag bmm
        broadcast_to bucketize cat cdist ceil celu channel_shuffle cholesky
        cholesky_inverse cholesky_solve chunk clamp clamp_max clamp_min clip
        clone col2im complex conj_physical constant_pad_nd contiguous conv1d
        conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
        convolution convolution_backward copy copysign cos cosh
        cosine_similarity count_nonzero cross_entropy_loss cummax cummin cumprod
        cumsum deg2rad detach detach_copy diag diag_embed diagonal
        diagonal_backward diagonal_copy diagonal_scatter digamma dist div divide
        dot dropout dstack einsum elu elu_backward embedding
        embedding_dense_backward eq erf erfc erfinv exp exp2 expand expand_as
        expand_copy expm1 eye fake_quantize_per_channel_affine_cachemask
        fake_quantize_per_tensor_affine_cachemask fill flatten flip floor
        floor_divide fmax fmin fmod frac fractional_max_pool2d
        fractional_max_pool2d_backward fractional_max_pool3d
        fractional_max_pool3d_backward frexp full full_like gather gcd ge gelu
        gelu_backward glu glu_backward glu_backward_jvp glu_jvp grid_sampler_2d
        grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward
        group_norm gt hamming_window hann_window hardshrink hardshrink_backward
        hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh
        hardtanh_backward heaviside histc hstack huber_loss huber_loss_backward
        hypot i0 igamma igammac im2col imag index index_add index_copy
        index_fill index_put index_reduce index_select inner instance_norm isin
        isinf isnan isneginf isposinf kaiser_window kl_div kthvalue l1_loss
        layer_norm lcm le leaky_relu leaky_relu_backward lerp lgamma lift
        lift_fresh lift_fresh_copy linalg_cholesky linalg_cholesky_ex
        linalg_cross linalg_det linalg_inv linalg_inv_ex linalg_matrix_exp
        linalg_matrix_norm linalg_norm linalg_pinv linalg_qr linalg_solve
        linalg_solve_triangular linalg_vector_norm linear linspace log log10
        log1p log2 log_sigmoid log_sigmoid_backward log_sigmoid_forward
        log_softmax logaddexp logaddexp2 logcumsumexp logdet logical_and
        logical_not logical_or logical_xor logit logit_backward logspace
        logsumexp lt masked_fill masked_scatter masked_scatter_backward
        masked_select matmul max max_pool1d max_pool2d max_pool2d_with_indices
        max_pool2d_with_indices_backward max_pool3d max_pool3d_with_indices
        max_pool3d_with_indices_backward max_unpool2d max_unpool3d maximum mean
        median min minimum mish mkldnn_rnn_layer mkldnn_rnn_layer_backward mm
        mode movedim mse_loss mse_loss_backward mul multi_margin_loss
        multi_margin_loss_backward multiply mv mvlgamma nan_to_num nanmedian
        nansum narrow narrow_copy native_batch_norm native_batch_norm_backward
        native_dropout native_dropout_backward native_group_norm
        native_group_norm_backward native_layer_norm native_layer_norm_backward
        ne neg negative new_full new_ones new_zeros nextafter nll_loss
        nll_loss2d_backward nll_loss2d_forward nll_loss_backward
        nll_loss_forward nll_loss_nd nonzero norm one_hot ones ones_like outer
        pairwise_distance permute permute_copy pinverse pixel_shuffle
        pixel_unshuffle polar polygamma pow prelu prod put rad2deg ravel real
        reciprocal reflection_pad1d reflection_pad1d_backward reflection_pad2d
        reflection_pad2d_backward reflection_pad3d reflection_pad3d_backward
        relu relu6 remainder renorm repeat repeat_interleave replication_pad1d
        replication_pad1d_backward replication_pad2d replication_pad2d_backward
        replication_pad3d replication_pad3d_backward reshape reshape_as
        resolve_conj resolve_neg rms_norm roll rot90 round
        rrelu_with_noise_backward rsqrt rsub scalar_tensor
        scaled_dot_product_attention scatter scatter_add scatter_reduce
        searchsorted select select_backward select_copy select_scatter selu sgn
        sigmoid sigmoid_backward sign signbit silu silu_backward sin sinc sinh
        slice slice_backward slice_copy slice_scatter smooth_l1_loss
        smooth_l1_loss_backward soft_margin_loss soft_margin_loss_backward
        softmax softplus softplus_backward softshrink softshrink_backward sort
        special_entr special_erf special_erfcx special_expit special_i0e
        special_i1 special_i1e special_log_ndtr special_ndtri special_xlog1py
        special_zeta split split_copy split_with_sizes split_with_sizes_copy
        sqrt square squeeze squeeze_copy stack std std_mean sub subtract sum
        swapaxes swapdims t t_copy take tan tanh tanh_backward tensor_split
        tensordot threshold threshold_backward to topk trace transpose
        transpose_copy trapezoid tril tril_indices triu triu_indices true_divide
        trunc type_as unbind unbind_copy unflatten unfold unfold_backward
        unfold_copy unique_consecutive unique_dim unsafe_split
        unsafe_split_with_sizes unsqueeze unsqueeze_copy upsample_bicubic2d
        upsample_bicubic2d_backward upsample_bilinear2d
        upsample_bilinear2d_backward upsample_linear1d
        upsample_linear1d_backward upsample_nearest1d
        upsample_nearest1d_backward upsample_nearest2d
        upsample_nearest2d_backward upsample_nearest3d
        upsample_nearest3d_backward upsample_trilinear3d
        upsample_trilinear3d_backward var var_mean vdot view view_as
        view_as_complex view_as_complex_copy view_as_real view_as_real_copy
        view_copy vstack where xlogy zero zeros zeros_like""",
}

#: Traits made of others.
_UNIONS: dict[Trait, tuple[Trait, ...]] = {
    # nothing to round, no site of their own
    "move values": (
        "keep values",
        "cast",
        "copy in",
        "reshape",
        "permute axes",
        "expand",
        "repeat",
        "reorder",
        "cut out",
        "join",
        "fill",
        "write into",
        "store or add",
        "sort",
        "drop out",
        "repack",
    ),
    # all elements of their operand, in its order
    "hand on in order": ("keep values", "cast", "reshape"),
    # one more or less of them is no difference between two programs
    "change no value": (
        "keep values",
        "cast",
        "copy in",
        "reshape",
        "permute axes",
        "expand",
    ),
    # the result holds values of the operands: no error of size can begin here
    "add no error": (
        "keep values",
        "copy in",
        "reshape",
        "permute axes",
        "expand",
        "repeat",
        "reorder",
        "cut out",
        "join",
        "fill",
        "write into",
        "look up",
        "choose values",
    ),
    "round nothing": (
        "keep values",
        "reshape",
        "permute axes",
        "expand",
        "repeat",
        "reorder",
        "cut out",
        "join",
        "fill",
        "write into",
        "sort",
        "repack",
        "look up",
        "choose values",
        "compute exactly",
    ),
    # what is left out was not removed from anything
    "take out or ask": ("cut out", "look up", "sort", "ask about values"),
}

#: Kinds of operators without contracted operands; any other is elementwise.
_KINDS: dict[Kind, str] = {
    "matmul": "einsum",
    "normalization": """
        layer_norm batch_norm group_norm instance_norm rms_norm local_response_norm""",
    "softmax": "softmax log_softmax softmin gumbel_softmax logsumexp",
    "reduction": """
        sum mean prod var std norm linalg_vector_norm linalg_norm cumsum cumprod amax
        amin max min avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d
        adaptive_avg_pool2d adaptive_avg_pool3d max_pool1d max_pool2d max_pool3d
        cross_entropy_loss nll_loss mse_loss l1_loss var_mean std_mean cdist
        cosine_similarity""",
}


@dataclass(frozen=True)
class OperandSpec:
    """One operand of a contracting operator.

    Attributes:
        index: its position among the arguments.
        name: its name among the arguments.
        reduce: the axis that it is contracted over.
        channel: of a weight, the axis that keeps a scale of its own.
        bias: added to the product, not multiplied.
    """

    index: int
    name: str
    reduce: int
    channel: int = 0
    bias: bool = False


@dataclass(frozen=True)
class OperatorSpec:
    """A contracting operator: its kind and its operands (others, masks say, are not rounded)."""

    kind: Kind
    operands: tuple[OperandSpec, ...]


def _spec(kind: Kind, *operands: tuple[Any, ...]) -> OperatorSpec:
    return OperatorSpec(kind, tuple(OperandSpec(*operand) for operand in operands))


def _conv(dimensions: int, transposed: bool = False) -> OperatorSpec:
    # channels of the input counted from the back: there may be no batch axis
    weight = (1, "weight", 0, 1) if transposed else (1, "weight", 1, 0)
    return _spec("conv", (0, "input", -1 - dimensions), weight, (2, "bias", 0, 0, True))


_MATMUL = _spec("matmul", (0, "input", -1, -2), (1, "other", -2, -1))
_ADD_MATMUL = _spec(
    "matmul", (0, "input", 0, 0, True), (1, "mat1", -1, -2), (2, "mat2", -2, -1)
)
_RNN = _spec("rnn", (0, "input", -1), (1, "hx", -1), (2, "params", 1, 0))
_RNN_CELL = _spec(
    "rnn",
    (0, "input", -1),
    (1, "hx", -1),
    (2, "w_ih", 1, 0),
    (3, "w_hh", 1, 0),
    (4, "b_ih", 0, 0, True),
    (5, "b_hh", 0, 0, True),
)

#: Operators that contract: which axis is summed over (blocks lie along it), and which
#: axis of a weight keeps its own scale. Any other operator takes all its floating-point
#: tensors as operands.
CONTRACTING: dict[str, OperatorSpec] = {
    "linear": _spec(
        "linear", (0, "input", -1), (1, "weight", 1, 0), (2, "bias", 0, 0, True)
    ),
    "bilinear": _spec(
        "linear",
        (0, "input1", -1),
        (1, "input2", -1),
        (2, "weight", 1, 0),
        (3, "bias", 0, 0, True),
    ),
    **{f"conv{d}d": _conv(d) for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": _conv(d, transposed=True) for d in (1, 2, 3)},
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot"), _MATMUL),
    "rmatmul": _spec("matmul", (1, "other", -1, -2), (0, "input", -2, -1)),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm"), _ADD_MATMUL),
    "scaled_dot_product_attention": _spec(
        "attention", (0, "query", -1), (1, "key", -1), (2, "value", -2)
    ),
    "embedding": _spec("embedding", (0, "weight", 1, 0)),
    "embedding_bag": _spec("embedding", (0, "weight", 1, 0)),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _RNN),
    **dict.fromkeys(
        ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), _RNN_CELL
    ),
}

_CONV_ARGUMENTS = "input weight bias stride padding dilation groups"
_CONV_TRANSPOSED = "input weight bias stride padding output_padding groups dilation"

#: The names of the first arguments, in their order.
_ARGUMENTS: dict[str, str] = {
    "linear": "input weight bias",
    **{f"conv{d}d": _CONV_ARGUMENTS for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": _CONV_TRANSPOSED for d in (1, 2, 3)},
    "batch_norm": "input weight bias running_mean running_var",
    "instance_norm": "input weight bias",
    "layer_norm": "input normalized_shape weight bias",
    "rms_norm": "input normalized_shape weight",
    "group_norm": "input num_groups weight bias",
    "prelu": "input weight",
    "embedding": "weight input",
    "embedding_bag": "weight input",
    "softmax": "input dim",
    "log_softmax": "input dim",
    "glu": "input dim",
    "norm": "input p dim",
    "linalg_vector_norm": "input ord dim",
    "clamp": "input min max",
    "clip": "input min max",
    "clamp_min": "input min",
    "clamp_max": "input max",
    "hardtanh": "input min_val max_val",
    "scaled_dot_product_attention": "query key value",
}

#: The numbers that an operator takes, where not all.
_DOMAINS = {
    "acos": "[-1, 1]",
    "asin": "[-1, 1]",
    "atanh": "(-1, 1)",
    "acosh": "[1, Inf)",
    "sqrt": "[0, Inf)",
    "lgamma": "positive numbers",
    "erfinv": "[-1, 1]",
    "logit": "[0, 1]",
}

#: The operand of which only the shape is read.
_SHAPE_ONLY = {
    "nll_loss_backward": 1,
    "nll_loss2d_backward": 1,
    "max_pool2d_with_indices_backward": 1,
    "expand_as": 1,
    "view_as": 1,
    "type_as": 1,
    "_adaptive_avg_pool2d_backward": 1,
    "avg_pool2d_backward": 1,
    "reflection_pad2d_backward": 1,
}

#: The argument that makes a store a sum.
_STORES_UNLESS = {
    "index_put": "accumulate",
    "_index_put_impl": "accumulate",
    "put": "accumulate",
    "scatter": "reduce",
}

#: Kernels that do not check all of their arguments, by what has to fit.
_SIZES_LIKE = {
    "batch norm": """
        batch_norm native_batch_norm native_batch_norm_backward _native_batch_norm_legit
        _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
        _batch_norm_no_update _batch_norm_with_update""",
    "group norm": "native_group_norm native_group_norm_backward",
    "layer norm": """
        native_layer_norm native_layer_norm_backward _fused_rms_norm
        _fused_rms_norm_backward""",
    "embedding's gradient": "embedding_dense_backward",
    "pool's gradient": """
        max_pool2d_with_indices_backward adaptive_max_pool2d_backward
        fractional_max_pool2d_backward""",
    "volume pool's gradient": """
        max_pool3d_with_indices_backward adaptive_max_pool3d_backward
        fractional_max_pool3d_backward""",
    "unpool": "max_unpool2d max_unpool3d",
    "targets": """
        nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward""",
    "Fourier transform": "_fft_c2c _fft_r2c _fft_c2r",
    "weight norm": "_weight_norm_interface",
    "weight norm's gradient": "_weight_norm_interface_backward",
    "softmax's gradient": "_softmax_backward_data _log_softmax_backward_data",
    "attention's gradient": "_scaled_dot_product_flash_attention_for_cpu_backward",
    "recurrent layer": "mkldnn_rnn_layer",
    "fold": "col2im",
    "packed rows": "_pack_padded_sequence",
    "bags": "_embedding_bag _embedding_bag_forward_only",
    "bags' gradient": "_embedding_bag_dense_backward",
    "labels": "_ctc_loss",
    "labels' gradient": "_ctc_loss_backward",
    "fused step": "_fused_adagrad _fused_adam _fused_adamw _fused_sgd",
}

#: How many operations a kernel takes, by the formula that counts them. What moves
#: values takes none, and of what torch tags as element by element or as a reduction
#: each element takes one: these need no line here.
_WORK = {
    "product": "mm bmm mv dot vdot _int_mm",
    "added product": "addmm baddbmm addmv addbmm _addmm_activation",
    "outer product": "addr",
    "linear": "linear mkldnn_linear _scaled_mm",
    "convolution": """
        convolution _convolution mkldnn_convolution cudnn_convolution
        cudnn_convolution_transpose cudnn_convolution_relu convolution_overrideable
        _slow_conv2d_forward slow_conv_dilated2d slow_conv_dilated3d
        slow_conv3d_forward slow_conv_transpose2d slow_conv_transpose3d
        _conv_depthwise2d conv_depthwise3d""",
    "convolution's gradient": "convolution_backward convolution_backward_overrideable",
    "attention": """
        _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
        _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
        _scaled_dot_product_fused_attention_overrideable""",
    "attention's gradient": """
        _scaled_dot_product_flash_attention_backward
        _scaled_dot_product_flash_attention_for_cpu_backward
        _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_cudnn_attention_backward
        _scaled_dot_product_fused_attention_overrideable_backward""",
    "recurrent layer": "mkldnn_rnn_layer",
    "recurrent layer's gradient": "mkldnn_rnn_layer_backward",
    "stacked recurrent layers": "_cudnn_rnn",
    "stacked recurrent layers' gradient": "_cudnn_rnn_backward",
    "recurrent cell": "_thnn_fused_lstm_cell _thnn_fused_gru_cell",
    "recurrent cell's gradient": """
        _thnn_fused_lstm_cell_backward_impl _thnn_fused_gru_cell_backward""",
    "product of three": "_trilinear",
    "norm of rows": "native_layer_norm native_group_norm",
    "root mean square norm": "_fused_rms_norm",
    "batch norm": """
        native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit
        _native_batch_norm_legit_functional _batch_norm_with_update""",
    "norm by running statistics": """
        _native_batch_norm_legit_no_training _batch_norm_no_update""",
    "norm's gradient": """
        native_layer_norm_backward native_group_norm_backward _fused_rms_norm_backward
        native_batch_norm_backward cudnn_batch_norm_backward batch_norm_backward""",
    "softmax": "_softmax _log_softmax _safe_softmax _masked_softmax",
    "softmax's gradient": """
        _softmax_backward_data _log_softmax_backward_data _masked_softmax_backward""",
    "one an element read": """
        _is_any_true _is_all_true
        cumsum cumprod logcumsumexp cummax cummin _cummax_helper _cummin_helper
        adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
        adaptive_max_pool2d adaptive_max_pool3d _aminmax median nanmedian
        nll_loss_forward nll_loss2d_forward trace embedding_dense_backward
        _embedding_bag_dense_backward scatter_add index_add histc bincount
        _unsafe_index_put _unsafe_masked_index_put_accumulate _index_put_impl
        avg_pool2d_backward avg_pool3d_backward
        max_pool2d_with_indices_backward max_pool3d_with_indices_backward
        adaptive_max_pool2d_backward adaptive_max_pool3d_backward col2im
        _amp_foreach_non_finite_check_and_unscale""",
    "one an element": """
        _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward _embedding_bag
        _embedding_bag_forward_only threshold threshold_backward gelu gelu_backward elu
        elu_backward hardswish hardswish_backward hardsigmoid hardsigmoid_backward
        hardtanh_backward hardshrink_backward softshrink_backward leaky_relu_backward
        softplus_backward mish glu glu_backward log_sigmoid_forward log_sigmoid_backward
        silu_backward rrelu_with_noise rrelu_with_noise_backward _prelu_kernel
        _prelu_kernel_backward mse_loss_backward smooth_l1_loss_backward
        huber_loss_backward binary_cross_entropy_backward soft_margin_loss_backward
        eq ne lt le gt ge xlogy floor_divide heaviside copysign rsub polar""",
    "three an element read": """
        mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss
        binary_cross_entropy_with_logits linalg_vector_norm native_norm var var_mean std
        std_mean norm dist""",
    "two an element": "native_dropout native_dropout_backward _masked_scale",
    "pooled windows": """
        avg_pool2d avg_pool3d max_pool2d_with_indices max_pool3d_with_indices
        mkldnn_max_pool2d mkldnn_max_pool3d""",
    "interpolation of lines": """
        upsample_linear1d upsample_linear1d_backward""",
    "interpolation of squares": """
        upsample_bilinear2d upsample_bilinear2d_backward _upsample_bilinear2d_aa
        _upsample_bilinear2d_aa_backward grid_sampler_2d grid_sampler_2d_backward
        cudnn_grid_sampler""",
    "interpolation of cubes": """
        upsample_trilinear3d upsample_trilinear3d_backward grid_sampler_3d
        grid_sampler_3d_backward""",
    "interpolation of 16 points": """
        upsample_bicubic2d upsample_bicubic2d_backward _upsample_bicubic2d_aa
        _upsample_bicubic2d_aa_backward""",
    "Fourier transform": "_fft_c2c",
    "real Fourier transform": "_fft_r2c _fft_c2r",
    "distances of pairs": "_cdist_forward _euclidean_dist _cdist_backward",
    "weight norm": "_weight_norm_interface _weight_norm_interface_backward",
    "step of SGD": "_fused_sgd",
    "step of Adam": "_fused_adam _fused_adamw",
    "step of Adagrad": "_fused_adagrad",
    "none": """
        _unique _unique2 unique_dim unique_consecutive nll_loss_backward
        nll_loss2d_backward select_backward slice_backward diagonal_backward
        reflection_pad1d reflection_pad2d reflection_pad3d reflection_pad1d_backward
        reflection_pad2d_backward reflection_pad3d_backward replication_pad1d
        replication_pad2d replication_pad3d replication_pad1d_backward
        replication_pad2d_backward replication_pad3d_backward upsample_nearest1d
        upsample_nearest2d upsample_nearest3d upsample_nearest1d_backward
        upsample_nearest2d_backward upsample_nearest3d_backward
        _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
        max_unpool2d max_unpool3d unfold_backward masked_scatter_backward nonzero
        _local_scalar_dense _cudnn_rnn_flatten_weight _has_same_storage_numel
        _transform_bias_rescale_qkv bucketize searchsorted isin set""",
}

#: What is read of the first operand, where not all of its elements.
_READS = {
    "as many elements as the result has": """
        embedding index index_select gather take select_copy slice_copy masked_select
        take_along_dim embedding_renorm _unsafe_index _unsafe_masked_index
        _embedding_bag _embedding_bag_forward_only grid_sampler_2d grid_sampler_3d""",
    "one element of each row": "nll_loss_forward nll_loss2d_forward",
}

#: (where, how far) the derivative jumps. leaky_relu's slope below zero is taken as none.
_KINKS = {
    "relu": ((0.0, 1.0),),
    "leaky_relu": ((0.0, 1.0),),
    "relu6": ((0.0, 1.0), (6.0, -1.0)),
    "abs": ((0.0, 2.0),),
    "hardtanh": ((-1.0, 1.0), (1.0, -1.0)),
}

#: Operators of other names, or made of others: the one by which torch.autocast decides.
_DECIDED_BY = {
    "rmatmul": "matmul",
    "einsum": "bmm",
    "chain_matmul": "mm",
    "multi_dot": "mm",
    "linalg_multi_dot": "mm",
    "tensordot": "mm",
    "lstm": "linear",
    "gru": "linear",
    "rnn_tanh": "linear",
    "rnn_relu": "linear",
    "lstm_cell": "linear",
    "gru_cell": "linear",
    "rnn_tanh_cell": "linear",
    "rnn_relu_cell": "linear",
    "rpow": "pow",
    "rdiv": "reciprocal",
    "softmin": "softmax",
    "cross_entropy_loss": "log_softmax",
}

#: The operator that a Python function calls, where it has another name.
_CALLS = {
    "cross_entropy": "cross_entropy_loss",
    "nll_loss": "nll_loss_nd",
    "norm": "linalg_vector_norm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorFacts:
    """What is known of one operator.

    Attributes:
        name: of a site or a kernel.
        kind: linear, matmul, conv, attention, rnn, embedding, normalization, softmax,
            reduction or elementwise.
        operands: of a contracting operator, which tensors it contracts and along which
            axes; empty where every floating-point tensor is an operand.
        arguments: the names of its first arguments, where rooms ask for them.
        multiplies: it multiplies and accumulates, so that it takes most of the time.
        domain: the numbers that it takes, as an interval; None for all.
        shape_only: the place of the operand of which only the shape is read, or None.
        stores_unless: the argument that makes it add to what is there, or None.
        kinks: (where, how far) its derivative jumps.
        decided_by: the operator by which torch.autocast decides about it, or None.
        calls: the operator that a Python function of this name calls.
        sizes_like: which sizes and indices its kernel does not check, or None.
        work: the formula that counts its operations, or None: see ``_WORK``.
        reads: what it reads of its first operand where not all, or None.
    """

    name: str
    kind: Kind
    operands: tuple[OperandSpec, ...]
    arguments: tuple[str, ...]
    multiplies: bool
    domain: str | None
    shape_only: int | None
    stores_unless: str | None
    kinks: tuple[tuple[float, float], ...]
    decided_by: str | None
    calls: str
    sizes_like: str | None
    work: str | None
    reads: str | None


@functools.cache
def facts(name: str) -> OperatorFacts:
    """Return what is known of an operator; one that the table lacks is elementwise.

    >>> facts("mm").kind, facts("mm").multiplies, facts("sqrt").domain
    ('matmul', True, '[0, Inf)')
    """
    spec = CONTRACTING.get(name)
    return OperatorFacts(
        name=name,
        kind=_kind(name),
        operands=() if spec is None else spec.operands,
        arguments=tuple(_ARGUMENTS.get(name, "").split()),
        multiplies=name in operators_that("multiply"),
        domain=_DOMAINS.get(name),
        shape_only=_SHAPE_ONLY.get(name),
        stores_unless=_STORES_UNLESS.get(name),
        kinks=_KINKS.get(name, ()),
        decided_by=_DECIDED_BY.get(name),
        calls=_CALLS.get(name, name),
        sizes_like=_SIZES_OF.get(name),
        work=_WORK_OF.get(name),
        reads=_READS_OF.get(name),
    )


@functools.cache
def operators_that(trait: Trait) -> frozenset[str]:
    """Return the operators that have a trait. Raises ``KeyError`` for a trait that there is not.

    >>> sorted(operators_that("permute axes"))[:4]
    ['H', 'T', 'adjoint', 'mH']
    >>> operators_that("cast") < operators_that("move values")
    True
    """
    if trait in _UNIONS:
        return frozenset().union(*map(operators_that, _UNIONS[trait]))
    names = frozenset(_TRAITS[trait].split())
    if trait == "multiply":
        names |= operators_of(MULTIPLYING_KINDS)
    return names


@functools.cache
def operators_of(kinds: tuple[Kind, ...]) -> frozenset[str]:
    """Return the operators of these kinds that the table names.

    >>> sorted(operators_of(("softmax",)))
    ['gumbel_softmax', 'log_softmax', 'logsumexp', 'softmax', 'softmin']
    """
    listed = {name for kind in kinds for name in _KINDS.get(kind, "").split()}
    contracting = {name for name, spec in CONTRACTING.items() if spec.kind in kinds}
    return frozenset(listed | contracting)


def base(operator: str) -> str:
    """Return the name without what says that a call works in place, or on lists.

    >>> base("add_"), base("_foreach_mul_"), base("_to_copy")
    ('add', 'mul', '_to_copy')
    """
    return operator.removeprefix("_foreach_").rstrip("_") or operator


def _kind(name: str) -> Kind:
    spec = CONTRACTING.get(name)
    if spec is not None:
        return spec.kind
    return _KIND_OF.get(name, "elementwise")


_KIND_OF: Mapping[str, Kind] = {
    name: kind for kind, names in _KINDS.items() for name in names.split()
}

_SIZES_OF: Mapping[str, str] = {
    name: rule for rule, names in _SIZES_LIKE.items() for name in names.split()
}

_WORK_OF: Mapping[str, str] = {
    name: rule for rule, names in _WORK.items() for name in names.split()
}

_READS_OF: Mapping[str, str] = {
    name: rule for rule, names in _READS.items() for name in names.split()
}
