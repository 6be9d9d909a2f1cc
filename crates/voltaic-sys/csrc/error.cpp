#include "error.h"

int32_t vt_error_kind_of(const vt_error *error) { return error->kind; }
const char *vt_error_message(const vt_error *error) { return error->message.c_str(); }
void vt_error_free(vt_error *error) { delete error; }
