"""The names of one operator in six systems, as a table; ``foreign_names.py`` reads it.

A row: sites of this package (what a ``TorchFunctionMode`` sees) | aten | TensorFlow |
Paddle | CANN | ONNX. All names of a cell are the same operator to the other systems;
``-``: the system has none, or builds it from others. A name may stand in several rows:
CANN's MatMul is what linear, mm and addmm all run. Indented lines continue a row.

The names are those that torch 2.13, TensorFlow 2.21, Paddle 3.3 and onnx 1.23 register
(tests compare them with what is installed), and for CANN those of the REG_OP prototypes
in its public headers. TensorFlow's Gelu comes with Intel's extension; Paddle's pnorm
and triplet_margin_loss stand only in its AMP lists.
"""

from __future__ import annotations

SYSTEMS = ("torch", "aten", "tensorflow", "paddle", "cann", "onnx")

TABLE = """
# matrix products
linear | linear | MatMul BatchMatMulV2 _FusedMatMul | linear_v2 linear fc mul fused_gemm_epilogue | MatMul MatMulV2
    MatMulV3 BatchMatMul BatchMatMulV2 BatchMatMulV3 | MatMul Gemm
matmul linalg_matmul inner rmatmul | matmul linalg_matmul inner | MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 |
    matmul_v2 matmul | MatMul MatMulV2 MatMulV3 BatchMatMul BatchMatMulV2 BatchMatMulV3 | MatMul
mm | mm | MatMul | matmul_v2 matmul | MatMul MatMulV2 MatMulV3 | MatMul
bmm | bmm | BatchMatMul BatchMatMulV2 BatchMatMulV3 | bmm | BatchMatMul BatchMatMulV2 BatchMatMulV3 | MatMul
addmm | addmm | MatMul _FusedMatMul | addmm | MatMul MatMulV2 MatMulV3 | Gemm
baddbmm addbmm | baddbmm addbmm | BatchMatMul BatchMatMulV2 BatchMatMulV3 | baddbmm | BatchMatMul BatchMatMulV2
    BatchMatMulV3 | MatMul
mv addmv | mv addmv | MatMul | mv | MatMul MatMulV2 MatMulV3 | MatMul
dot vdot | dot vdot | MatMul | dot | Dot | MatMul
outer addr | outer addr | - | - | - | -
einsum | einsum | Einsum | einsum | Einsum | Einsum
tensordot | tensordot | MatMul | matmul_v2 matmul | MatMul MatMulV2 MatMulV3 | MatMul
chain_matmul linalg_multi_dot | chain_matmul linalg_multi_dot | MatMul | multi_dot | MatMul MatMulV2 MatMulV3 | MatMul
bilinear | bilinear _trilinear | - | bilinear bilinear_tensor_product | - | -
scaled_dot_product_attention | scaled_dot_product_attention _scaled_dot_product_attention_math
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention | - | flash_attn flash_attn_unpadded
    memory_efficient_attention fused_dot_product_attention | FlashAttentionScore PromptFlashAttention
    FusedInferAttentionScore | Attention
multi_head_attention_forward | _native_multi_head_attention | - | fused_attention fused_multi_transformer |
    MultiHeadAttention | -
# convolutions
conv1d | conv1d convolution _convolution | Conv2D | conv2d | Conv2D Conv2DV2 | Conv
conv2d | conv2d convolution _convolution mkldnn_convolution cudnn_convolution thnn_conv2d | Conv2D DepthwiseConv2dNative
    _FusedConv2D _FusedDepthwiseConv2dNative | conv2d depthwise_conv2d | Conv2D Conv2DV2 DepthwiseConv2D | Conv
conv3d | conv3d convolution _convolution slow_conv3d | Conv3D _FusedConv3D | conv3d | Conv3D Conv3DV2 | Conv
conv_transpose1d | conv_transpose1d convolution _convolution | Conv2DBackpropInput | conv2d_transpose | Conv2DTranspose
    | ConvTranspose
conv_transpose2d | conv_transpose2d convolution _convolution | Conv2DBackpropInput | conv2d_transpose
    depthwise_conv2d_transpose | Conv2DTranspose Deconvolution | ConvTranspose
conv_transpose3d | conv_transpose3d convolution _convolution | Conv3DBackpropInputV2 | conv3d_transpose |
    Conv3DTranspose Conv3DTransposeV2 | ConvTranspose
conv_tbc | conv_tbc | Conv2D | conv2d | Conv2D Conv2DV2 | Conv
# recurrent layers
lstm | lstm | BlockLSTM BlockLSTMV2 CudnnRNN CudnnRNNV2 CudnnRNNV3 | rnn lstm cudnn_lstm | DynamicRNN DynamicRNNV2
    DynamicLSTM DynamicLSTMV2 CommonLSTM LSTM | LSTM
gru | gru | CudnnRNN CudnnRNNV2 CudnnRNNV3 | rnn gru | DynamicGRU DynamicGRUV2 CommonGRU Gru | GRU
rnn_tanh rnn_relu | rnn_tanh rnn_relu | CudnnRNN CudnnRNNV2 CudnnRNNV3 | rnn | RNN BasicRNNCell | RNN
lstm_cell | lstm_cell _thnn_fused_lstm_cell | LSTMBlockCell | - | BasicLSTMCell ThnnFusedLstmCell | LSTM
gru_cell | gru_cell _thnn_fused_gru_cell | GRUBlockCell | gru_unit | DynamicGRUV2 | GRU
rnn_tanh_cell rnn_relu_cell | rnn_tanh_cell rnn_relu_cell | - | - | BasicRNNCell | RNN
# embeddings
embedding | embedding | GatherV2 ResourceGather | embedding lookup_table lookup_table_v2 | Embedding GatherV2 | Gather
embedding_bag | embedding_bag _embedding_bag _embedding_bag_forward_only | - | - | EmbeddingBag | -
# softmax
softmax | softmax _softmax _safe_softmax | Softmax | softmax | SoftmaxV2 | Softmax
log_softmax | log_softmax _log_softmax | LogSoftmax | log_softmax | LogSoftmaxV2 | LogSoftmax
logsumexp | logsumexp special_logsumexp | - | logsumexp | ReduceLogSumExp | ReduceLogSumExp
gumbel_softmax | - | - | gumbel_softmax | - | -
# normalisation
layer_norm | layer_norm native_layer_norm | _MklLayerNorm | layer_norm | LayerNorm LayerNormV3 LayerNormV4 |
    LayerNormalization
rms_norm | rms_norm _fused_rms_norm | - | rms_norm | RmsNorm | RMSNormalization
batch_norm | batch_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training
    _batch_norm_impl_index cudnn_batch_norm | FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 _FusedBatchNormEx |
    batch_norm | BatchNorm BatchNormV3 BNTrainingReduce BNTrainingUpdate BNInfer | BatchNormalization
group_norm | group_norm native_group_norm | - | group_norm | GroupNorm GroupNormV2 | GroupNormalization
instance_norm | instance_norm | - | instance_norm | InstanceNorm InstanceNormV2 | InstanceNormalization
_weight_norm | _weight_norm _weight_norm_interface | - | - | - | -
cosine_similarity | cosine_similarity | - | - | - | -
# losses
cross_entropy_loss | cross_entropy_loss | SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits |
    cross_entropy_with_softmax softmax_with_cross_entropy cross_entropy cross_entropy2 c_softmax_with_cross_entropy |
    SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits CrossEntropyLoss SoftmaxCrossEntropyLoss |
    SoftmaxCrossEntropyLoss
nll_loss_nd nll_loss nll_loss2d | nll_loss_nd nll_loss nll_loss2d nll_loss_forward nll_loss2d_forward | - | nll_loss |
    NLLLoss NllLoss | NegativeLogLikelihoodLoss
mse_loss | mse_loss | SquaredDifference | - | MseLoss MSELossV2 SquaredDifference | -
l1_loss | l1_loss | - | - | LpLoss | -
smooth_l1_loss | smooth_l1_loss | - | - | SmoothL1Loss SmoothL1LossV2 | -
huber_loss | huber_loss | - | huber_loss | HuberLoss | -
kl_div | kl_div | - | kldiv_loss | KLDiv KLDivV2 | -
binary_cross_entropy | binary_cross_entropy | - | bce_loss | BinaryCrossEntropy BinaryCrossEntropyV2 | -
binary_cross_entropy_with_logits | binary_cross_entropy_with_logits | - | sigmoid_cross_entropy_with_logits |
    SigmoidCrossEntropyWithLogits SigmoidCrossEntropyWithLogitsV2 | -
hinge_embedding_loss | hinge_embedding_loss | - | - | HingeEmbeddingLoss | -
margin_ranking_loss | margin_ranking_loss | - | - | - | -
triplet_margin_loss | triplet_margin_loss | - | triplet_margin_loss | - | -
cosine_embedding_loss | cosine_embedding_loss | - | - | CosineEmbeddingLoss | -
soft_margin_loss | soft_margin_loss | - | - | SoftMarginLoss | -
multi_margin_loss | multi_margin_loss | - | - | - | -
multilabel_margin_loss | multilabel_margin_loss multilabel_margin_loss_forward | - | - | MultilabelMarginLoss | -
poisson_nll_loss | poisson_nll_loss | - | - | PoissonNllLoss | -
ctc_loss | ctc_loss _ctc_loss | CTCLoss CTCLossV2 | warpctc | CTCLoss CTCLossV2 | -
# pooling
max_pool1d | max_pool1d max_pool1d_with_indices | MaxPool | max_pool2d_with_index pool2d | MaxPool MaxPoolV3 | MaxPool
max_pool2d | max_pool2d max_pool2d_with_indices | MaxPool MaxPoolV2 MaxPoolWithArgmax | max_pool2d_with_index pool2d
    max_pool2d_v2 | MaxPool MaxPoolV2 MaxPoolV3 MaxPoolWithArgmax | MaxPool
max_pool3d | max_pool3d max_pool3d_with_indices | MaxPool3D | max_pool3d_with_index pool3d | MaxPool3D | MaxPool
avg_pool1d | avg_pool1d | AvgPool | pool2d | AvgPool1D | AveragePool
avg_pool2d | avg_pool2d | AvgPool | pool2d | AvgPool AvgPoolV2 | AveragePool
avg_pool3d | avg_pool3d | AvgPool3D | pool3d | AvgPool3D AvgPool3DV2 | AveragePool
adaptive_avg_pool1d | adaptive_avg_pool1d | - | pool2d | - | GlobalAveragePool
adaptive_avg_pool2d | adaptive_avg_pool2d _adaptive_avg_pool2d | - | pool2d | AdaptiveAvgPool2d GlobalAveragePool |
    GlobalAveragePool
adaptive_avg_pool3d | adaptive_avg_pool3d _adaptive_avg_pool3d | - | pool3d | AdaptiveAvgPool3d | GlobalAveragePool
adaptive_max_pool2d | adaptive_max_pool2d | - | max_pool2d_with_index | AdaptiveMaxPool2d | GlobalMaxPool
adaptive_max_pool3d | adaptive_max_pool3d | - | max_pool3d_with_index | AdaptiveMaxPool3d | GlobalMaxPool
# resizing
upsample_nearest1d | upsample_nearest1d | - | nearest_interp nearest_interp_v2 | UpsampleNearest1d | Resize
upsample_nearest2d | upsample_nearest2d | ResizeNearestNeighbor | nearest_interp nearest_interp_v2 |
    ResizeNearestNeighborV2 | Resize
upsample_nearest3d | upsample_nearest3d | - | nearest_interp nearest_interp_v2 | UpsampleNearest3d | Resize
upsample_linear1d | upsample_linear1d | - | linear_interp linear_interp_v2 | Resize | Resize
upsample_bilinear2d | upsample_bilinear2d _upsample_bilinear2d_aa | ResizeBilinear | bilinear_interp bilinear_interp_v2
    | ResizeBilinearV2 | Resize
upsample_bicubic2d | upsample_bicubic2d _upsample_bicubic2d_aa | ResizeBicubic | bicubic_interp bicubic_interp_v2 |
    ResizeBicubic | Resize
upsample_trilinear3d | upsample_trilinear3d | - | trilinear_interp trilinear_interp_v2 | UpsampleTrilinear3d | Resize
grid_sampler grid_sampler_2d | grid_sampler grid_sampler_2d | - | grid_sample grid_sampler | GridSampler2D | GridSample
grid_sampler_3d | grid_sampler_3d | - | grid_sample | GridSampler3D | GridSample
affine_grid_generator | affine_grid_generator | - | affine_grid | AffineGrid | AffineGrid
col2im | col2im | - | fold | Col2im | Col2Im
# activations
relu | relu | Relu | relu | Relu | Relu
relu6 | relu6 | Relu6 | relu6 | Relu6 | Clip
gelu | gelu | Gelu | gelu | Gelu GeluV2 | Gelu
silu | silu | - | silu swish | Swish | Swish
mish | mish | - | mish | Mish | Mish
leaky_relu | leaky_relu | LeakyRelu | leaky_relu | LeakyRelu | LeakyRelu
prelu | prelu _prelu_kernel | - | prelu | PRelu | PRelu
elu | elu | Elu | elu | Elu EluV2 | Elu
selu | selu | Selu | selu | Selu | Selu
celu | celu | - | celu | Celu CeluV2 | Celu
glu | glu | - | - | GLU | -
softplus | softplus | Softplus | softplus | Softplus SoftplusV2 | Softplus
sigmoid | sigmoid | Sigmoid | sigmoid | Sigmoid | Sigmoid
log_sigmoid | log_sigmoid log_sigmoid_forward | - | logsigmoid | LogSigmoid | -
hardsigmoid | hardsigmoid | - | hardsigmoid hard_sigmoid | HardSigmoid | HardSigmoid
hardswish | hardswish | - | hardswish hard_swish | HardSwish | HardSwish
hardtanh | hardtanh | - | hardtanh | - | Clip
hardshrink | hardshrink | - | hard_shrink hardshrink | HardShrink | Shrink
softshrink | softshrink | - | softshrink | SoftShrink Softshrink | Shrink
threshold | threshold | - | thresholded_relu | ThresholdV2D | ThresholdedRelu
tanh | tanh | Tanh | tanh | Tanh | Tanh
# elementwise
add | add | Add AddV2 AddN BiasAdd | elementwise_add add add_n | Add AddV2 AddN BiasAdd | Add
sub rsub | sub rsub | Sub | elementwise_sub subtract | Sub | Sub
mul | mul | Mul | elementwise_mul multiply | Mul | Mul
div rdiv | div | RealDiv Div | elementwise_div divide | RealDiv Div | Div
floor_divide | floor_divide | FloorDiv | elementwise_floordiv floor_divide | FloorDiv | -
remainder fmod | remainder fmod | FloorMod Mod | elementwise_mod remainder | FloorMod Mod | Mod
pow rpow | pow | Pow | elementwise_pow pow | Pow | Pow
square | square | Square | square | Square | -
sqrt | sqrt | Sqrt | sqrt | Sqrt | Sqrt
rsqrt | rsqrt | Rsqrt | rsqrt | Rsqrt | -
reciprocal | reciprocal | Reciprocal Inv | reciprocal | Reciprocal | Reciprocal
exp | exp | Exp | exp | Exp | Exp
exp2 | exp2 | - | - | - | -
expm1 | expm1 | Expm1 | expm1 | Expm1 | -
log | log | Log | log | Log | Log
log2 | log2 | - | log2 | - | -
log10 | log10 | - | log10 | - | -
log1p | log1p | Log1p | log1p | Log1p | -
erf | erf | Erf | erf | Erf | Erf
erfc | erfc | Erfc | - | Erfc | -
erfinv | erfinv | Erfinv | erfinv | Erfinv | -
sin | sin | Sin | sin | Sin | Sin
cos | cos | Cos | cos | Cos | Cos
tan | tan | Tan | tan | Tan | Tan
sinh | sinh | Sinh | sinh | Sinh | Sinh
cosh | cosh | Cosh | cosh | Cosh | Cosh
asin | asin | Asin | asin | Asin | Asin
acos | acos | Acos | acos | Acos | Acos
atan | atan | Atan | atan | Atan | Atan
atan2 | atan2 | Atan2 | atan2 | Atan2 | -
asinh | asinh | Asinh | asinh | Asinh | Asinh
acosh | acosh | Acosh | acosh | Acosh | Acosh
atanh | atanh | Atanh | atanh | Atanh | Atanh
neg | neg | Neg | - | Neg | Neg
abs | abs | Abs | abs | Abs | Abs
sign | sign | Sign | sign | Sign | Sign
floor | floor | Floor | floor | Floor | Floor
ceil | ceil | Ceil | ceil | Ceil | Ceil
round | round | Round Rint | round | Round Rint | Round
maximum | maximum | Maximum | elementwise_max maximum fmax | Maximum | Max
minimum | minimum | Minimum | elementwise_min minimum fmin | Minimum | Min
clamp clip clamp_min clamp_max | clamp clip clamp_min clamp_max | ClipByValue | clip | ClipByValue ClipByValueV2 | Clip
lerp | lerp | - | lerp | Lerp | -
addcmul | addcmul | - | - | Addcmul | -
addcdiv | addcdiv | - | - | Addcdiv | -
nan_to_num | nan_to_num | - | - | - | -
cross linalg_cross | cross linalg_cross | Cross | cross | Cross | -
# reductions
sum | sum | Sum | reduce_sum sum | ReduceSum ReduceSumD | ReduceSum
mean | mean | Mean | reduce_mean mean | ReduceMean ReduceMeanD | ReduceMean
prod | prod | Prod | reduce_prod prod | ReduceProd ReduceProdD | ReduceProd
amax max | amax max | Max | reduce_max reduce_amax max amax | ReduceMax ReduceMaxD | ReduceMax
amin min | amin min | Min | reduce_min reduce_amin min amin | ReduceMin ReduceMinD | ReduceMin
var var_mean | var var_mean | - | variance var | ReduceVar ReduceMeanVariance | -
std std_mean | std std_mean | - | std | ReduceStd ReduceStdV2 | -
norm linalg_vector_norm linalg_norm | norm linalg_vector_norm linalg_norm | EuclideanNorm L2Loss | p_norm pnorm
    frobenius_norm norm squared_l2_norm | LpNorm LpNormV2 EuclideanNorm L2Loss | ReduceL1 ReduceL2 LpNormalization
linalg_matrix_norm frobenius_norm nuclear_norm | linalg_matrix_norm frobenius_norm nuclear_norm | - | frobenius_norm |
    LpNorm LpNormV2 | -
renorm | renorm | - | renorm | Renorm | -
cumsum | cumsum | Cumsum | cumsum | Cumsum | CumSum
cumprod | cumprod | Cumprod | cumprod | Cumprod | CumProd
logcumsumexp | logcumsumexp _logcumsumexp | CumulativeLogsumexp | logcumsumexp | CumulativeLogsumexp | -
cummax | cummax | - | cummax | Cummax | -
cummin | cummin | - | cummin | Cummin | -
dist | dist | - | dist | - | -
cdist pairwise_distance pdist | cdist _cdist_forward pairwise_distance pdist | - | - | Cdist | -
trace | trace | - | trace | - | -
# linear algebra
linalg_inv inverse | linalg_inv inverse linalg_inv_ex | MatrixInverse | inverse | MatrixInverse | -
linalg_det det | linalg_det det _linalg_det | MatrixDeterminant | determinant det | MatrixDeterminant | Det
linalg_cholesky cholesky | linalg_cholesky cholesky linalg_cholesky_ex | Cholesky | cholesky | Cholesky | -
linalg_svd svd | linalg_svd svd _linalg_svd | Svd | svd | Svd | -
linalg_qr qr | linalg_qr qr | Qr | qr | Qr | -
linalg_solve | linalg_solve | MatrixSolve | solve | MatrixSolve | -
# indexing that adds or scales
index_add | index_add | - | index_add | IndexAdd InplaceIndexAdd | -
scatter_add | scatter_add | TensorScatterAdd ScatterAdd | - | ScatterAdd | ScatterElements
scatter_reduce | scatter_reduce | - | put_along_axis | - | ScatterElements
# what moves values
cat | cat | Concat ConcatV2 | concat | Concat ConcatV2 ConcatD | Concat
stack | stack | Pack | stack | Pack | -
split chunk unbind | split split_with_sizes chunk unbind | Split SplitV Unpack | split split_with_num unbind unstack |
    Split SplitV SplitD SplitVD Unpack | Split
getitem narrow select | slice select narrow | StridedSlice Slice | slice strided_slice | StridedSlice StridedSliceD
    Slice | Slice
index_select | index_select | Gather GatherV2 | index_select gather | GatherV2 GatherV2D | Gather
gather take_along_dim | gather take_along_dim | GatherNd | take_along_axis gather_nd | GatherElements GatherD GatherNd |
    GatherElements GatherND
scatter | scatter | TensorScatterUpdate ScatterNd | scatter put_along_axis | ScatterElements ScatterNd ScatterUpdate |
    ScatterElements ScatterND
index_put | index_put | TensorScatterUpdate | index_put | IndexPut IndexPutV2 | ScatterND
where | where | Select SelectV2 | where | Select SelectV2 | Where
masked_fill | masked_fill | - | masked_fill | MaskedFill | -
pad constant_pad_nd | pad constant_pad_nd | Pad PadV2 MirrorPad | pad pad3d | Pad PadV2 PadV3 PadD MirrorPad | Pad
reshape view flatten | reshape view _unsafe_view flatten | Reshape | reshape reshape2 flatten | Reshape | Reshape
    Flatten
transpose permute T mT t | transpose permute t | Transpose | transpose transpose2 | Transpose TransposeD | Transpose
squeeze | squeeze | Squeeze | squeeze squeeze2 | Squeeze | Squeeze
unsqueeze | unsqueeze | ExpandDims | unsqueeze unsqueeze2 | ExpandDims Unsqueeze | Unsqueeze
expand broadcast_to | expand broadcast_to | BroadcastTo | expand expand_v2 | BroadcastTo BroadcastToD ExpandD Expand |
    Expand
tile repeat | tile repeat | Tile | tile | Tile TileD | Tile
flip | flip | Reverse ReverseV2 | flip reverse | ReverseV2 | -
roll | roll | Roll | roll | Roll | -
tril triu | tril triu | MatrixBandPart | tril_triu tril triu | Tril Triu | Trilu
topk | topk | TopK TopKV2 | top_k_v2 topk | TopK TopKD TopKV2 | TopK
sort | sort | - | argsort | Sort | -
dropout | dropout native_dropout | - | dropout | Dropout DropOutDoMask DropOutDoMaskV3 | Dropout
to type_as | to _to_copy | Cast | cast | Cast | Cast CastLike
one_hot | one_hot | OneHot | one_hot one_hot_v2 | OneHot OneHotD | OneHot
pixel_shuffle | pixel_shuffle | DepthToSpace | pixel_shuffle | DepthToSpace | DepthToSpace
"""
