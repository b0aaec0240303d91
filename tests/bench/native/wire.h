/* What the stand-in worker and the load share: one clock, so that a chunk's stamp can be compared, and header lines. */
#pragma once
#include <stdint.h>
#include <string.h>
#include <strings.h>
#include <time.h>

/* Digits of a stamp: nanoseconds of CLOCK_MONOTONIC behind an '@' in a content chunk's text. */
enum { STAMP_DIGITS = 18 };

static inline uint64_t tick(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* The value of a header ("name:" in any case) in a head that ends with a NUL, or NULL. */
static inline const char *header(const char *head, const char *name) {
    size_t length = strlen(name);
    for (const char *line = strstr(head, "\r\n"); line; line = strstr(line + 2, "\r\n"))
        if (!strncasecmp(line + 2, name, length)) return line + 2 + length + strspn(line + 2 + length, " ");
    return NULL;
}
