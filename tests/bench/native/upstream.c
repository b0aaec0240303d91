/* A stand-in for vLLM workers that costs far less than any proxy in front of it.
 *
 *     upstream [-m MODEL] [-l MAX_MODEL_LEN] [-t TTFT_US] PORT...
 *
 * One thread, epoll, HTTP/1.1 with keep-alive; every PORT is one worker. A request is steered by standard fields only,
 * so that the steering survives a proxy that parses and rewrites the body: "stream", "max_tokens" = content chunks,
 * "seed" = microseconds between them (0: one after the other, as fast as the socket takes them), "include_usage".
 *
 * A stream's first content chunk is written at once (after TTFT_US). Paced streams of one worker then move together, on
 * the worker's own grid of instants, as the sequences of an engine step do. Every content chunk is one write of about
 * 250 bytes and carries the time of that write (see wire.h). */
#define _GNU_SOURCE
#include "upstream.h"
#include "wire.h"
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <unistd.h>

#define NEVER UINT64_MAX
enum { MAX_WORKERS = 64, LONGEST_HEAD = 16000, FIRST_ROOM = 16384, BATCH = 512 };

static struct worker workers[MAX_WORKERS];
static int worker_count, poller, live_count, live_room;
static struct connection **live;
static uint64_t earliest = NEVER, ttft;
static volatile sig_atomic_t ended;

static void end(int number) { (void)number; ended = 1; }

/* ---- bytes out ---- */

static void watch(struct connection *c, int operation, bool writable) {
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | (writable ? EPOLLOUT : 0u), .data.ptr = c};
    epoll_ctl(poller, operation, c->fd, &event);
}

bool emit(struct connection *c, const char *bytes, size_t length) {
    if (!c->out_length) {
        ssize_t took = send(c->fd, bytes, length, MSG_NOSIGNAL);
        if (took == (ssize_t)length) return true;
        if (took < 0 && errno != EAGAIN) return false;
        if (took > 0) bytes += took, length -= (size_t)took;
        watch(c, EPOLL_CTL_MOD, true);
    }
    if (c->out_length + length > c->out_room) c->out = realloc(c->out, c->out_room = (c->out_length + length) * 2);
    memcpy(c->out + c->out_length, bytes, length);
    c->out_length += length;
    return true;
}

static bool drain(struct connection *c) {
    size_t gone = 0;
    while (gone < c->out_length) {
        ssize_t took = send(c->fd, c->out + gone, c->out_length - gone, MSG_NOSIGNAL);
        if (took < 0 && errno != EAGAIN) return false;
        if (took <= 0) break;
        gone += (size_t)took;
    }
    memmove(c->out, c->out + gone, c->out_length - gone);
    c->out_length -= gone;
    if (!c->out_length) watch(c, EPOLL_CTL_MOD, false), earliest = 0;
    return true;
}

/* ---- streams ---- */

void begin_stream(struct connection *c, uint64_t step) {
    if (live_count == live_room) live = realloc(live, (size_t)(live_room = live_room ? live_room * 2 : 1024) * sizeof *live);
    live[c->slot = live_count++] = c;
    c->worker->active++;
    c->worker->streams++;
    c->step = step, c->started = false, c->sent = 0;
    c->due = ttft ? tick() + ttft : 0;
    if (c->due < earliest) earliest = c->due;
}

static void leave(struct connection *c) {
    live[c->slot] = live[--live_count];
    live[c->slot]->slot = c->slot;
    c->slot = -1;
    c->worker->active--;
}

/* The next instant of the worker's grid; the grids of several workers lie evenly between each other. */
static uint64_t next_instant(const struct connection *c, uint64_t now) {
    if (!c->step) return 0;
    uint64_t shift = c->step * (uint64_t)(c->worker - workers) / (uint64_t)worker_count;
    return (now - shift) / c->step * c->step + c->step + shift;
}

static bool begin_answer(struct connection *c) {
    char head[1024];
    size_t n = (size_t)snprintf(head, sizeof head, "HTTP/1.1 200 OK\r\ndate: Mon, 01 Dec 2025 00:00:00 GMT\r\nserver: uvicorn\r\n"
                                "content-type: text/event-stream; charset=utf-8\r\n%stransfer-encoding: chunked\r\n\r\n", c->closes ? "connection: close\r\n" : "");
    c->started = true;
    if (c->chat) memcpy(head + n, role_frame.bytes, role_frame.length), n += role_frame.length;
    return emit(c, head, n);
}

static bool end_answer(struct connection *c) {
    char text[2048];
    const struct frame *last = &last_frame[c->chat];
    size_t n = last->length;
    memcpy(text, last->bytes, n);
    if (c->usage) n += frame_usage(text + n, sizeof text - n, c);
    n += (size_t)snprintf(text + n, sizeof text - n, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
    leave(c);
    return emit(c, text, n);
}

/* Writes what is due of one stream. False when the peer is gone. */
static bool advance(struct connection *c) {
    if (!c->started && !begin_answer(c)) return false;
    if (c->sent < c->wanted) {
        struct frame *frame = &token_frame[c->chat];
        uint64_t now = tick(), rest = now;
        for (size_t i = STAMP_DIGITS; i-- > 0; rest /= 10) frame->bytes[frame->stamp + i] = (char)('0' + rest % 10);
        if (!emit(c, frame->bytes, frame->length)) return false;
        c->sent++;
        c->worker->chunks++;
        c->due = next_instant(c, now);
    }
    return c->sent < c->wanted || end_answer(c);
}

/* ---- requests ---- */

static bool finished(const struct connection *c) { return c->closes && c->slot < 0 && !c->out_length; }

/* Answers every whole request in the buffer. False when the connection is to be closed. */
static bool take(struct connection *c) {
    while (c->slot < 0 && c->in_length) {
        size_t seen = c->in_length < LONGEST_HEAD ? c->in_length : LONGEST_HEAD;
        char *blank = memmem(c->in, seen, "\r\n\r\n", 4);
        if (!blank) return seen < LONGEST_HEAD;
        size_t head = (size_t)(blank - c->in) + 4;
        if (!c->whole) {
            blank[2] = 0;
            const char *length = header(c->in, "content-length:"), *fate = header(c->in, "connection:");
            c->closes = fate && !strncasecmp(fate, "close", 5);
            c->whole = head + (length ? strtoull(length, NULL, 10) : 0);
            if (header(c->in, "transfer-encoding:")) {
                refuse(c, 411, "send content-length");
                return false;
            }
            blank[2] = '\r';
            if (c->whole + FIRST_ROOM > c->in_room) c->in = realloc(c->in, c->in_room = c->whole + FIRST_ROOM);
        }
        if (c->in_length < c->whole) return true;
        if (!route(c, c->in, c->in + head, c->whole - head)) return false;
        c->in_length -= c->whole;
        memmove(c->in, c->in + c->whole, c->in_length);
        c->whole = 0;
        if (finished(c)) return false;
    }
    return true;
}

static bool receive(struct connection *c) {
    for (;;) {
        size_t room = c->in_room - c->in_length - 1;
        if (!room) return false;
        ssize_t got = recv(c->fd, c->in + c->in_length, room, 0);
        if (got == 0 || (got < 0 && errno != EAGAIN)) return false;
        if (got < 0) return true;
        c->in_length += (size_t)got;
        c->in[c->in_length] = 0;
        /* While the rest of a long body comes, nothing before it is looked at again. */
        if (c->in_length >= c->whole && !take(c)) return false;
        if ((size_t)got < room) return true;
    }
}

static void drop(struct connection *c) {
    if (c->slot >= 0) leave(c), c->worker->aborted++;
    close(c->fd);
    free(c->in), free(c->out), free(c);
}

static void welcome(struct worker *w) {
    for (int fd, one = 1; (fd = accept4(w->fd, NULL, NULL, SOCK_NONBLOCK)) >= 0;) {
        struct connection *c = calloc(1, sizeof *c);
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        c->kind = CONNECTION, c->fd = fd, c->worker = w, c->slot = -1;
        c->in = malloc(c->in_room = FIRST_ROOM * 2);
        watch(c, EPOLL_CTL_ADD, false);
    }
}

static void serve(struct connection *c, uint32_t events) {
    bool stays = !(events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR));
    if (stays && events & EPOLLOUT) stays = drain(c) && !finished(c);
    if (stays && events & EPOLLIN) stays = receive(c);
    if (!stays) drop(c);
}

/* Moves every stream that is due; one whose reader is behind waits for it. */
static void advance_all(void) {
    uint64_t now = tick();
    earliest = NEVER;
    for (int i = live_count; i-- > 0;) {
        struct connection *c = live[i];
        if (c->out_length) continue;
        if (c->due <= now && (!advance(c) || finished(c) || (c->slot < 0 && !take(c)))) {
            drop(c);
            continue;
        }
        if (c->slot >= 0 && c->due < earliest) earliest = c->due;
    }
}

static bool open_worker(const char *port) {
    struct worker *w = &workers[worker_count++];
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port)), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = w};
    int one = 1;
    w->kind = LISTENER, w->port = atoi(port);
    w->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(w->fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(w->fd, (struct sockaddr *)&address, sizeof address) || listen(w->fd, 4096)) return false;
    return !epoll_ctl(poller, EPOLL_CTL_ADD, w->fd, &event);
}

static void set_up(void) {
    struct rlimit files;
    struct timespec wall;
    if (!getrlimit(RLIMIT_NOFILE, &files)) files.rlim_cur = files.rlim_max, setrlimit(RLIMIT_NOFILE, &files);
    signal(SIGTERM, end), signal(SIGINT, end);
    clock_gettime(CLOCK_REALTIME, &wall);
    persona.started_at = (double)wall.tv_sec + (double)wall.tv_nsec / 1e9;
    make_frames();
    poller = epoll_create1(0);
}

int main(int argc, char **argv) {
    for (int option; (option = getopt(argc, argv, "m:l:t:")) != -1;) {
        if (option == 'm') persona.model = optarg;
        else if (option == 'l') persona.longest_prompt = atoi(optarg);
        else if (option == 't') ttft = strtoull(optarg, NULL, 10) * 1000;
        else return 2;
    }
    if (optind == argc || argc - optind > MAX_WORKERS) return fprintf(stderr, "usage: upstream [-m MODEL] [-l MAX_MODEL_LEN] [-t TTFT_US] PORT...\n"), 2;
    set_up();
    for (int i = optind; i < argc; i++)
        if (!open_worker(argv[i])) return fprintf(stderr, "upstream: cannot listen on port %s: %s\n", argv[i], strerror(errno)), 1;
    for (struct epoll_event events[BATCH]; !ended;) {
        uint64_t now = tick(), wait = earliest > now ? earliest - now : 0;
        struct timespec pause = {.tv_sec = (time_t)(wait / 1000000000u), .tv_nsec = (long)(wait % 1000000000u)};
        int count = epoll_pwait2(poller, events, BATCH, earliest == NEVER ? NULL : &pause, NULL);
        for (int i = 0; i < count; i++) {
            if (*(int *)events[i].data.ptr == LISTENER) welcome(events[i].data.ptr);
            else serve(events[i].data.ptr, events[i].events);
        }
        if (live_count && earliest <= tick()) advance_all();
    }
    return 0;
}
