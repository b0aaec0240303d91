/* Spans of time, kept one by one, and their percentiles in milliseconds. */
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

struct samples { float *ms; size_t count, room; };

static inline void note(struct samples *s, uint64_t from, uint64_t to) {
    if (s->count == s->room) s->ms = realloc(s->ms, (s->room = s->room ? s->room * 2 : 65536) * sizeof *s->ms);
    s->ms[s->count++] = to > from ? (float)((double)(to - from) / 1e6) : 0;
}

static inline int by_size(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static inline void print_samples(const char *name, struct samples *s) {
    if (!s->count) { printf("\"%s\":null,", name); return; }
    qsort(s->ms, s->count, sizeof *s->ms, by_size);
    printf("\"%s\":{\"n\":%zu,\"p50\":%.4f,\"p99\":%.4f,\"max\":%.4f},", name, s->count,
           s->ms[(s->count - 1) / 2], s->ms[(s->count - 1) * 99 / 100], s->ms[s->count - 1]);
}
