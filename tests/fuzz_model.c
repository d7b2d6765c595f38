/* Fuzzes the reader of model.bin: any bytes either open or are refused with one line. The head's
 * checksum is made right first, or almost nothing would get past it. */
#define _GNU_SOURCE /* memfd_create */
#include "model/file.h"
#include "tests/tiny_model.h"

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    static int descriptor = -1;
    char path[64];
    if (descriptor < 0) descriptor = memfd_create("model.bin", 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d", descriptor);

    /* The input is laid over the start of a valid file, so that every field can be reached. */
    struct tiny model = tiny_make();
    memcpy(model.data, data, bytes < model.bytes ? bytes : model.bytes);
    tiny_seal(&model);
    if (ftruncate(descriptor, (off_t)model.bytes) ||
        pwrite(descriptor, model.data, model.bytes, 0) != (ssize_t)model.bytes)
        abort();
    free(model.data);

    struct model_file file;
    struct error error = {0};
    if (model_open(&file, path, &error)) {
        if (error.code != EXIT_BAD_FILE || !error.text[0]) abort();
        return 0;
    }
    if (config_supported(&file.config, &error) == 0) model_check(&file, &error);
    model_close(&file);
    return 0;
}
