/* The stand-in worker in two parts: upstream.c moves bytes and streams, answers.c knows what a worker says. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { LISTENER, CONNECTION };

struct worker {
    int kind, fd, port, active;
    unsigned long long requests, streams, chunks, aborted, prompt_tokens;
};

struct connection {
    int kind, fd;
    struct worker *worker;
    char *in; /* the request as it comes: head, body, and what follows it */
    size_t in_length, in_room, whole;
    char *out; /* what the socket did not take yet */
    size_t out_length, out_room;
    bool closes, chat, started, usage;
    int slot; /* its place among the live streams, -1 for none */
    int wanted, sent;
    size_t prompt;
    uint64_t due, step; /* the next write and the time between writes, nanoseconds */
};

/* One SSE event in its HTTP chunk; stamp is where the digits of the time go, 0 for none. */
struct frame { char bytes[640]; size_t length, stamp; };

/* What this stand-in calls its model, how long a prompt it says to take, and when it started (seconds of the epoch). */
struct persona { const char *model; int longest_prompt; double started_at; };
extern struct persona persona;

/* upstream.c. Both are false when the peer is gone. */
bool emit(struct connection *c, const char *bytes, size_t length);
void begin_stream(struct connection *c, uint64_t step);

/* answers.c. route is false when the peer is gone. */
extern struct frame role_frame, token_frame[2], last_frame[2]; /* [0] text, [1] chat */
void make_frames(void);
size_t frame_usage(char *to, size_t room, const struct connection *c);
bool refuse(struct connection *c, int status, const char *why);
bool route(struct connection *c, const char *head, const char *body, size_t length);
