/* A fake vLLM engine for measuring routers: it answers at once, so that what is measured is the router.
 *
 *     engine [-r prefill|decode]        prints "port N" and serves on 127.0.0.1:N until it is killed
 *
 * A prefill hop (role prefill, `max_tokens` 1 or `do_remote_decode` true) is answered in JSON with
 * `kv_transfer_params`; any other request with `max_tokens` tokens, as events if it says `stream`, one every
 * `seed` microseconds, or all at once where it names none. A decode answer carries a handle of kvloop's, as
 * kvloop's own engines add it. Token ids are in the events where they are asked for, and those of a prompt of
 * 1600 in the first. What routers probe is answered too; GET /served counts the hops.
 *
 * One thread, epoll, level-triggered. Streams under way stand in a queue in the order of their next event. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { BATCH = 256, BLOCKS = 100, READ_BYTES = 4096 };

#define ID "8f14e45fceea167a5a36dedd4bea2543"
#define HANDLE "\"kv_transfer_params\":{\"kvloop_handle\":\"%0240d\"}"

struct buffer {
    char *data;
    size_t used, room;
};

struct client {
    int fd;
    bool wants_write, streaming, chat, ids, queued, closed;
    struct buffer in, out;
    size_t sent;
    long left; /* events of the stream under way */
    uint64_t due_us, interval_us;
    struct client *before, *after; /* in the queue; once closed, `after` leads through the dead */
};

struct piece {
    char *data;
    size_t length;
};

static int poller;
static bool is_prefill;
static unsigned long served;
static struct client *first, *last, *dead;
static struct piece prefilled[2], event[2][2][3], stream_end, stream_head; /* [chat] and [chat][ids][place] */

static uint64_t now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000ull + now.tv_nsec / 1000;
}

static void dequeue(struct client *c) {
    if (!c->queued) return;
    if (c->before) c->before->after = c->after; else first = c->after;
    if (c->after) c->after->before = c->before; else last = c->before;
    c->before = c->after = NULL;
    c->queued = false;
}

static void enqueue(struct client *c) {
    struct client *before = last;
    while (before && before->due_us > c->due_us) before = before->before;
    c->before = before;
    c->after = before ? before->after : first;
    if (c->after) c->after->before = c; else last = c;
    if (before) before->after = c; else first = c;
    c->queued = true;
}

static void add(struct buffer *b, const char *data, size_t length) {
    if (b->used + length > b->room) {
        b->room = 2 * (b->used + length) + READ_BYTES;
        b->data = realloc(b->data, b->room);
    }
    memcpy(b->data + b->used, data, length);
    b->used += length;
}

static void add_piece(struct client *c, struct piece piece) { add(&c->out, piece.data, piece.length); }

static void hang_up(struct client *c) {
    if (c->closed) return;
    dequeue(c);
    close(c->fd);
    c->closed = true;
    c->after = dead;
    dead = c;
}

static void watch(struct client *c, bool wants_write) {
    if (c->wants_write == wants_write) return;
    struct epoll_event wanted = {.events = EPOLLIN | (wants_write ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &wanted);
    c->wants_write = wants_write;
}

static void flush(struct client *c) {
    while (!c->closed && c->sent < c->out.used) {
        ssize_t n = send(c->fd, c->out.data + c->sent, c->out.used - c->sent, MSG_NOSIGNAL);
        if (n >= 0) {
            c->sent += n;
        } else if (errno == EAGAIN) {
            watch(c, true);
            return;
        } else {
            hang_up(c);
        }
    }
    if (c->closed) return;
    c->sent = c->out.used = 0;
    watch(c, false);
}

static struct piece printed(char *text) { return (struct piece){text, strlen(text)}; }

static struct piece chunk(const char *text) {
    char *framed;
    if (asprintf(&framed, "%zx\r\n%s\r\n", strlen(text), text) < 0) abort();
    return printed(framed);
}

static void make_answers(void) {
    static const char *const names[2] = {"cmpl", "chatcmpl"};
    static const char *const kinds[2] = {"text_completion", "chat.completion"};
    static const char *const choices[2] = {"\"text\":\" t\"", "\"message\":{\"role\":\"assistant\",\"content\":\" t\",\"refusal\":null,\"tool_calls\":[]}"};
    static const char *const finishes[3] = {"null", "null", "\"stop\""}; /* the first, another, the last */
    static const char *const pieces[2] = {"\"text\":\" token\"", "\"delta\":{\"content\":\" token\"}"};
    char blocks[BLOCKS * 8], prompt[1600 * 8], *at = blocks, *text;
    for (int i = 0; i < BLOCKS; i++) at += sprintf(at, "%s%d", i ? ", " : "", 12000 + i * 7);
    at = prompt;
    for (int i = 0; i < 1600; i++) at += sprintf(at, "%s%d", i ? "," : "", 10000 + i * 50);
    for (int chat = 0; chat < 2; chat++) {
        if (asprintf(&text,
                     "{\"id\":\"%s-" ID "\",\"object\":\"%s\",\"created\":1764000000,\"model\":\"m\",\"choices\":[{\"index\":0,%s,"
                     "\"logprobs\":null,\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":1600,\"total_tokens\":1601,"
                     "\"completion_tokens\":1},\"kv_transfer_params\":{\"do_remote_prefill\":true,\"do_remote_decode\":false,"
                     "\"remote_block_ids\":[[%s]],\"remote_engine_id\":\"5f0e3c1a-7f4d-4b8e-9d0e-3a1c2b4d5e6f\","
                     "\"remote_request_id\":\"%s-" ID "\",\"remote_host\":\"127.0.0.1\",\"remote_port\":5600,\"tp_size\":1,"
                     "\"remote_num_tokens\":1600,\"kvloop_turn\":{\"prompt_tokens\":1600,\"local_tokens\":0,"
                     "\"returned_tokens\":0,\"computed_tokens\":1600,\"reason\":null}}}",
                     names[chat], kinds[chat], choices[chat], blocks, names[chat]) < 0) abort();
        prefilled[chat] = printed(text);
        for (int kind = 0; kind < 6; kind++) {
            int ids = kind / 3, place = kind % 3;
            if (asprintf(&text, "data: {\"id\":\"%s-" ID "\",\"object\":\"%s%s\",\"created\":1764000000,\"model\":\"m\","
                                "\"choices\":[{\"index\":0,%s,\"logprobs\":null,\"finish_reason\":%s,\"token_ids\":%s}]%s%s%s}\n\n",
                         names[chat], kinds[chat], chat ? ".chunk" : "", pieces[chat], finishes[place], ids ? "[100264]" : "null",
                         ids && !place ? ",\"prompt_token_ids\":[" : "", ids && !place ? prompt : "", ids && !place ? "]" : "") < 0) abort();
            event[chat][ids][place] = chunk(text);
        }
    }
    if (asprintf(&text, "data: {\"object\":\"kvloop.handle\",\"choices\":[]," HANDLE "}\n\n", 0) < 0) abort();
    struct piece handle = chunk(text), done = chunk("data: [DONE]\n\n");
    if (asprintf(&text, "%s%s0\r\n\r\n", handle.data, done.data) < 0) abort();
    stream_end = printed(text);
    stream_head = printed("HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                          "transfer-encoding: chunked\r\n\r\n");
}

static void answer(struct client *c, const char *body, size_t length, const char *type) {
    char head[200];
    int n = sprintf(head, "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-length: %zu\r\ncontent-type: %s\r\n\r\n", length, type);
    add(&c->out, head, n);
    add(&c->out, body, length);
}

static const char *value_of(const char *body, size_t length, const char *key) {
    const char *at = memmem(body, length, key, strlen(key));
    if (!at) return NULL;
    at += strlen(key);
    while (at < body + length && (*at == ' ' || *at == ':')) at++;
    return at;
}

static long number_of(const char *body, size_t length, const char *key, long otherwise) {
    const char *at = value_of(body, length, key);
    return at && *at >= '0' && *at <= '9' ? atol(at) : otherwise;
}

static bool is_true(const char *body, size_t length, const char *key) {
    const char *at = value_of(body, length, key);
    return at && !strncmp(at, "true", 4);
}

static void emit(struct client *c, bool begins) {
    c->left--;
    add_piece(c, event[c->chat][c->ids][c->left == 0 ? 2 : !begins]);
    if (c->left) return;
    add_piece(c, stream_end);
    c->streaming = false;
}

static void answer_probe(struct client *c, const char *path) {
    static const struct { const char *path, *body; } probes[] = {
        {"/v1/models", "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\",\"created\":1764000000,\"owned_by\":\"vllm\",\"root\":\"m\",\"parent\":null,\"max_model_len\":131072}]}"},
        {"/metrics", "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name=\"m\"} 0.0\n# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{model_name=\"m\"} 0.0\n# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{model_name=\"m\"} 0.0\n"},
        {"/get_model_info", "{\"model_path\":\"m\",\"tokenizer_path\":\"m\",\"is_generation\":true,\"served_model_name\":\"m\"}"},
        {"/model_info", "{\"model_path\":\"m\",\"tokenizer_path\":\"m\",\"is_generation\":true,\"served_model_name\":\"m\"}"},
        {"/get_server_info", "{\"model_path\":\"m\",\"served_model_name\":\"m\",\"tp_size\":1,\"dp_size\":1,\"version\":\"0.5.5\"}"},
        {"/server_info", "{\"model_path\":\"m\",\"served_model_name\":\"m\",\"tp_size\":1,\"dp_size\":1,\"version\":\"0.5.5\"}"},
        {"/version", "{\"version\":\"0.32.0\"}"},
    };
    if (!strncmp(path, "/served", 7)) {
        char count[64];
        answer(c, count, sprintf(count, "{\"served\":%lu}", served), "application/json");
        return;
    }
    for (size_t i = 0; i < sizeof probes / sizeof *probes; i++) {
        if (strncmp(path, probes[i].path, strlen(probes[i].path))) continue;
        answer(c, probes[i].body, strlen(probes[i].body), i == 1 ? "text/plain; version=0.0.4" : "application/json");
        return;
    }
    answer(c, "{}", 2, "application/json");
}

static void answer_whole(struct client *c, long tokens) {
    struct buffer text = {0};
    char rest[600];
    static const char start[] = "{\"id\":\"x-" ID "\",\"object\":\"chat.completion\",\"created\":1764000000,\"model\":\"m\",\"choices\":[{\"index\":0,";
    add(&text, start, strlen(start));
    const char *opening = c->chat ? "\"message\":{\"role\":\"assistant\",\"content\":\"" : "\"text\":\"";
    add(&text, opening, strlen(opening));
    for (long i = 0; i < tokens; i++) add(&text, " token", 6);
    int n = sprintf(rest, "\"%s,\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":1600,\"total_tokens\":%ld,\"completion_tokens\":%ld}," HANDLE "}",
                    c->chat ? "}" : "", 1600 + tokens, tokens, 0);
    add(&text, rest, n);
    answer(c, text.data, text.used, "application/json");
    free(text.data);
}

static void handle(struct client *c, const char *head, size_t head_length, const char *body, size_t length) {
    if (!strncmp(head, "GET ", 4)) {
        answer_probe(c, head + 4);
        return;
    }
    served++;
    c->chat = memmem(head, head_length < 120 ? head_length : 120, "/chat/completions", 17) != NULL;
    long tokens = number_of(body, length, "\"max_tokens\"", number_of(body, length, "\"max_completion_tokens\"", 16));
    bool is_stream = is_true(body, length, "\"stream\"");
    bool for_prefill = is_prefill || tokens == 1 || is_true(body, length, "\"do_remote_decode\"");
    if (for_prefill && !(is_stream && is_prefill)) {
        answer(c, prefilled[c->chat].data, prefilled[c->chat].length, "application/json");
    } else if (is_stream) {
        add_piece(c, stream_head);
        c->left = for_prefill ? 1 : tokens;
        c->interval_us = number_of(body, length, "\"seed\"", 0);
        c->streaming = true;
        c->ids = is_true(body, length, "\"return_token_ids\"");
        emit(c, true);
        while (c->streaming && !c->interval_us) emit(c, false);
        if (!c->streaming) return;
        c->due_us = now_us() + c->interval_us;
        enqueue(c);
    } else {
        answer_whole(c, tokens);
    }
}

/* A chunked body, put together in place. Its length, or -1 while it is not whole; *rest: where it ends. */
static ssize_t dechunk(char *body, char *end, char **rest) {
    char *from = body, *to = body;
    for (int pass = 0; pass < 2; pass++) {
        for (from = body;;) {
            char *line = memmem(from, end - from, "\r\n", 2);
            if (!line) return -1;
            size_t length = strtoul(from, NULL, 16);
            if ((size_t)(end - line) < length + 4) return -1;
            from = line + 2;
            if (!length) break;
            if (pass) memmove(to, from, length), to += length;
            from += length + 2;
        }
    }
    *rest = from + 2;
    return to - body;
}

static void take_requests(struct client *c) {
    while (!c->streaming && c->in.used) {
        char *data = c->in.data, *end = data + c->in.used, *rest;
        *end = 0;
        char *blank = memmem(data, c->in.used, "\r\n\r\n", 4);
        if (!blank) return;
        char *body = blank + 4;
        blank[2] = 0;
        char *has_length = strcasestr(data, "\ncontent-length:");
        char *is_chunked = strcasestr(data, "\ntransfer-encoding: chunked");
        blank[2] = '\r';
        ssize_t length = has_length ? atol(has_length + 16) : 0;
        if (is_chunked) length = dechunk(body, end, &rest);
        else rest = body + length;
        if (length < 0 || rest > end) return;
        handle(c, data, body - data, body, length);
        memmove(data, rest, end - rest);
        c->in.used = end - rest;
    }
}

static void take_bytes(struct client *c) {
    for (;;) {
        if (c->in.room - c->in.used < READ_BYTES) {
            c->in.room = c->in.room ? 2 * c->in.room : 2 * READ_BYTES;
            c->in.data = realloc(c->in.data, c->in.room);
        }
        size_t room = c->in.room - c->in.used - 1;
        ssize_t n = recv(c->fd, c->in.data + c->in.used, room, 0);
        if (n > 0) c->in.used += n;
        if (n == 0 || (n < 0 && errno != EAGAIN)) hang_up(c);
        if (n < (ssize_t)room) break;
    }
    if (c->closed) return;
    take_requests(c);
    flush(c);
}

static void welcome(int listening) {
    for (int fd, one = 1; (fd = accept4(listening, NULL, NULL, SOCK_NONBLOCK)) >= 0;) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct client *c = calloc(1, sizeof *c);
        c->fd = fd;
        struct epoll_event wanted = {.events = EPOLLIN, .data.ptr = c};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &wanted);
    }
}

static void send_due(void) {
    for (uint64_t now = now_us(); first && first->due_us <= now;) {
        struct client *c = first;
        dequeue(c);
        emit(c, false);
        if (c->streaming) {
            c->due_us += c->interval_us; /* a late engine catches up: lateness is the client's to count */
            enqueue(c);
        } else {
            take_requests(c);
        }
        flush(c);
    }
}

static int listen_anywhere(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (bind(fd, (void *)&address, length) || listen(fd, 4096) || getsockname(fd, (void *)&address, &length)) {
        perror("listen");
        exit(1);
    }
    printf("port %d\n", ntohs(address.sin_port));
    fflush(stdout);
    return fd;
}

int main(int count, char **words) {
    for (int option; (option = getopt(count, words, "r:")) != -1;) is_prefill = option == 'r' && !strcmp(optarg, "prefill");
    signal(SIGPIPE, SIG_IGN);
    make_answers();
    int listening = listen_anywhere();
    poller = epoll_create1(0);
    struct epoll_event wanted = {.events = EPOLLIN, .data.ptr = NULL}, found[BATCH];
    epoll_ctl(poller, EPOLL_CTL_ADD, listening, &wanted);
    for (;;) {
        uint64_t now = now_us(), wait_us = first && first->due_us > now ? first->due_us - now : 0;
        struct timespec wait = {wait_us / 1000000, wait_us % 1000000 * 1000};
        int n = epoll_pwait2(poller, found, BATCH, first ? &wait : NULL, NULL);
        for (int i = 0; i < n; i++) {
            struct client *c = found[i].data.ptr;
            if (!c) { welcome(listening); continue; }
            if (found[i].events & EPOLLOUT) flush(c);
            if (!c->closed && found[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) take_bytes(c);
        }
        send_due();
        while (dead) {
            struct client *c = dead;
            dead = c->after;
            free(c->in.data);
            free(c->out.data);
            free(c);
        }
    }
}
