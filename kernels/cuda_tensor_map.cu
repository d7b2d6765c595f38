#include "kernels/cuda_tensor_map.h"

#include <cudaTypedefs.h>

/* The driver's function, asked for once and through the runtime, so that no library of the driver
 * is linked. */
static PFN_cuTensorMapEncodeTiled_v12000 encoder(struct cuda_backend *b) {
    static PFN_cuTensorMapEncodeTiled_v12000 encode = NULL;
    if (encode) return encode;
    void *entry = NULL;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                                12000, cudaEnableDefault, &found);
    if (cuda_failed(b, "cudaGetDriverEntryPointByVersion", status)) return NULL;
    if (found != cudaDriverEntryPointSuccess) {
        cuda_failed(b, "cuTensorMapEncodeTiled", cudaErrorNotSupported);
        return NULL;
    }
    encode = (PFN_cuTensorMapEncodeTiled_v12000)entry;
    return encode;
}

bool cuda_tensor_map(struct cuda_backend *b, CUtensorMap *map, const struct tensor_view *tensor) {
    if (b->error.code) return false;
    const PFN_cuTensorMapEncodeTiled_v12000 encode = encoder(b);
    if (!encode) return false;
    cuuint64_t size[TENSOR_RANK], stride[TENSOR_RANK];
    cuuint32_t box[TENSOR_RANK], every[TENSOR_RANK];
    for (int i = 0; i < tensor->rank; i++) {
        size[i] = tensor->size[i];
        box[i] = tensor->box[i];
        every[i] = 1;
        if (i > 0) stride[i - 1] = tensor->stride[i];
    }
    const uint32_t row = box[0] * (uint32_t)sizeof(__nv_bfloat16);
    const CUtensorMapSwizzle swizzle = row == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                       : row == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                       : row == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                                   : CU_TENSOR_MAP_SWIZZLE_NONE;
    const CUresult result = encode(
        map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, (cuuint32_t)tensor->rank,
        const_cast<void *>(tensor->start), size, stride, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return !cuda_failed(b, "cuTensorMapEncodeTiled",
                        result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue);
}

bool cuda_matrix_map(struct cuda_backend *b, CUtensorMap *map, const void *start, int rows,
                     int columns, int box_rows) {
    struct tensor_view t = {};
    t.start = start;
    t.rank = 2;
    t.size[0] = (uint64_t)columns;
    t.size[1] = (uint64_t)rows;
    t.stride[1] = (uint64_t)columns * 2;
    t.box[0] = 64;
    t.box[1] = (uint32_t)box_rows;
    return cuda_tensor_map(b, map, &t);
}
