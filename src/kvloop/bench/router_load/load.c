/* Clients of a router, in one thread.
 *
 *     load -p PORT -b BODYFILE -c CLIENTS -d SECONDS [-w WARM_UP_SECONDS] [-e EVENTS] [-i INTERVAL_US] [-k KEY]
 *
 * Each client sends a request, reads the answer, and begins again on the same connection. In the body, a run
 * of twelve @ is replaced with the request's number, so that no two requests are alike. The window opens
 * WARM_UP_SECONDS after every client has had a first byte ("begin" is printed) and lasts SECONDS; then one
 * line of JSON tells what happened in it. An answer that is not 200, breaks off, or (-e) has fewer events is
 * an error. With -i an event counts as late if it comes more than one interval after its time, which is so
 * many intervals after its stream's first event. At most OPENING clients wait for a first byte at a time. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { BATCH = 256, OPENING = 64, HEAD_BYTES = 8192, READ_BYTES = 262144, STAMP = 12, SAID = 3 };
enum { GIVE_UP_S = 120, DRAIN_S = 3 };
enum framing { SIZE, DATA, AFTER_DATA, LAST };

struct client {
    int fd, status;
    char *request;
    size_t sent, head_used;
    char head[HEAD_BYTES];
    bool wants_write, in_body, chunked, closes, has_begun;
    enum framing framing;
    long left; /* of the body, or of the chunk */
    double began, first_byte, first_event;
    long events;
    char last; /* byte of the body, if it may be half of a blank line */
};

struct times {
    float *ms;
    size_t used, room;
};

static int poller, port, clients = 1, live, started, opening, expected = 0, said;
static double warm_s = 0.5, lasts_s = 2, interval_s, opens = 1e18, shuts = 1e18;
static bool stopping;
static size_t request_length, stamp_at;
static unsigned long number;
static long requests, errors, events, late, connections;
static double most_behind;
static struct times took, first_took;
static struct client *all;

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + at.tv_nsec * 1e-9;
}

static bool within(double at) { return at >= opens && at < shuts; }

static void note(struct times *t, double seconds) {
    if (t->used == t->room) t->ms = realloc(t->ms, (t->room = 2 * t->room + 1024) * sizeof *t->ms);
    t->ms[t->used++] = seconds * 1e3;
}

static void went_wrong(const char *what, const char *detail) {
    errors++;
    if (said++ < SAID) fprintf(stderr, "%s: %.300s\n", what, detail);
}

static void watch(struct client *c, bool wants_write) {
    if (c->wants_write == wants_write) return;
    struct epoll_event wanted = {.events = EPOLLIN | (wants_write ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &wanted);
    c->wants_write = wants_write;
}

static void send_request(struct client *c) {
    while (c->sent < request_length) {
        ssize_t n = send(c->fd, c->request + c->sent, request_length - c->sent, MSG_NOSIGNAL);
        if (n < 0) {
            if (errno == EAGAIN) watch(c, true);
            return; /* of anything else the read side will hear */
        }
        c->sent += n;
    }
    watch(c, false);
}

static void connect_to_router(struct client *c) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int one = 1;
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (c->fd < 0 || connect(c->fd, (void *)&address, sizeof address)) {
        perror("connect");
        exit(1);
    }
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    struct epoll_event wanted = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &wanted);
    c->wants_write = false;
    connections++;
}

static void begin(struct client *c) {
    if (stopping) {
        live--;
        return;
    }
    if (c->fd < 0) connect_to_router(c);
    if (stamp_at) {
        char stamp[STAMP + 1];
        snprintf(stamp, sizeof stamp, "%012lu", ++number % 1000000000000ul);
        memcpy(c->request + stamp_at, stamp, STAMP);
    }
    c->sent = c->head_used = 0;
    c->in_body = c->chunked = c->closes = false;
    c->framing = SIZE;
    c->left = 0;
    c->events = 0;
    c->last = 0;
    c->first_byte = c->first_event = 0;
    c->began = now();
    send_request(c);
}

static void leave(struct client *c) {
    close(c->fd);
    c->fd = -1;
}

static void finish(struct client *c) {
    double at = now();
    if (c->status != 200) went_wrong("status", c->head);
    else if (c->events < expected) went_wrong("an answer with too few events", c->head);
    else if (within(at)) {
        requests++;
        note(&took, at - c->began);
        note(&first_took, c->first_byte - c->began);
    }
    if (c->closes) leave(c);
    begin(c);
}

static void open_more(void) {
    while (started < clients && opening < OPENING) {
        opening++;
        live++;
        begin(&all[started++]);
    }
}

static void saw_event(struct client *c, double at) {
    c->events++;
    if (within(at)) events++;
    if (!interval_s) return;
    if (c->events == 1) c->first_event = at;
    double behind = at - c->first_event - (c->events - 1) * interval_s;
    if (!within(at)) return;
    if (behind > interval_s) late++;
    if (behind > most_behind) most_behind = behind;
}

static void take_body(struct client *c, const char *data, size_t length) {
    const char *end = data + length;
    double at = now();
    if (!c->first_byte) {
        c->first_byte = at;
        if (!c->has_begun) {
            c->has_begun = true;
            opening--;
            open_more();
        }
    }
    if (c->last == '\n' && *data == '\n') {
        saw_event(c, at);
        data++;
    }
    c->last = 0;
    for (const char *line; data < end && (line = memchr(data, '\n', end - data)); data = line + 1) {
        if (line + 1 == end) c->last = '\n';
        else if (line[1] == '\n') line++, saw_event(c, at);
    }
}

/* The answer's head. False while it is not whole; *data is moved to the body. */
static bool take_head(struct client *c, const char **data, const char *end) {
    size_t had = c->head_used, n = end - *data, room = HEAD_BYTES - 1 - had;
    if (n > room) n = room;
    memcpy(c->head + had, *data, n);
    c->head_used += n;
    c->head[c->head_used] = 0;
    char *blank = strstr(c->head, "\r\n\r\n"), *length;
    if (!blank) return false;
    *data += blank + 4 - c->head - had;
    blank[2] = 0;
    c->status = atoi(c->head + 9);
    length = strcasestr(c->head, "\ncontent-length:");
    c->left = length ? atol(length + 16) : 0;
    c->chunked = strcasestr(c->head, "\ntransfer-encoding: chunked") != NULL;
    c->closes = strcasestr(c->head, "\nconnection: close") != NULL;
    c->in_body = true;
    return true;
}

static void take_chunks(struct client *c, const char *data, const char *end) {
    while (data < end) {
        if (c->framing == DATA) {
            size_t n = end - data > c->left ? (size_t)c->left : (size_t)(end - data);
            take_body(c, data, n);
            data += n;
            c->left -= n;
            if (!c->left) c->framing = AFTER_DATA;
            continue;
        }
        char byte = *data++;
        if (c->framing == SIZE && byte != '\n') {
            int digit = byte >= '0' && byte <= '9' ? byte - '0' : (byte | 32) >= 'a' && (byte | 32) <= 'f' ? (byte | 32) - 'a' + 10 : -1;
            if (digit >= 0) c->left = c->left * 16 + digit;
        } else if (byte == '\n') {
            if (c->framing == LAST) {
                finish(c);
                return;
            }
            c->framing = c->framing == AFTER_DATA ? SIZE : c->left ? DATA : LAST;
        }
    }
}

static void take_bytes(struct client *c) {
    static char bytes[READ_BYTES];
    ssize_t n = recv(c->fd, bytes, sizeof bytes, 0);
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
        leave(c);
        went_wrong("an answer broke off", c->head);
        if (errors > 2000 || stopping) exit(1);
        begin(c);
        return;
    }
    const char *data = bytes, *end = bytes + n;
    if (!c->in_body && !take_head(c, &data, end)) return;
    if (c->chunked) {
        take_chunks(c, data, end);
        return;
    }
    if (end > data) take_body(c, data, end - data);
    c->left -= end - data;
    if (c->left <= 0) finish(c);
}

static int compare(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static double quantile(struct times *t, double share) { return t->used ? t->ms[(size_t)(share * (t->used - 1))] : 0; }

static void report(void) {
    double seconds = now() - opens;
    qsort(took.ms, took.used, sizeof *took.ms, compare);
    qsort(first_took.ms, first_took.used, sizeof *first_took.ms, compare);
    printf("{\"clients\":%d,\"seconds\":%.6f,\"requests\":%ld,\"errors\":%ld,\"events\":%ld,\"late\":%ld,"
           "\"behind_ms\":%.3f,\"p50_ms\":%.4f,\"p99_ms\":%.4f,\"first_p50_ms\":%.4f,\"connections\":%ld}\n",
           live, seconds, requests, errors, events, late, most_behind * 1e3, quantile(&took, .5), quantile(&took, .99),
           quantile(&first_took, .5), connections);
    fflush(stdout);
}

static void read_body(const char *path, const char *key) {
    FILE *file = fopen(path, "r");
    char *body = malloc(1 << 24), *stamp;
    size_t length = file ? fread(body, 1, (1 << 24) - 1, file) : 0;
    body[length] = 0;
    for (int i = 0; i < clients; i++) {
        int n = asprintf(&all[i].request,
                         "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nuser-agent: load\r\naccept: */*\r\n"
                         "content-type: application/json\r\nauthorization: Bearer %s\r\ncontent-length: %zu\r\n\r\n%s",
                         key, length, body);
        if (n < 0 || !length) exit(1);
        request_length = n;
        all[i].fd = -1;
        stamp = strstr(all[i].request, "@@@@@@@@@@@@");
        stamp_at = stamp ? stamp - all[i].request : 0;
    }
    free(body);
}

static void run(double until) {
    struct epoll_event found[BATCH];
    double wait = until - now();
    int n = epoll_wait(poller, found, BATCH, wait > 0 ? (wait < .5 ? (int)(wait * 1e3) + 1 : 500) : 0);
    for (int i = 0; i < n; i++) {
        struct client *c = found[i].data.ptr;
        if (c->fd >= 0 && found[i].events & EPOLLOUT) send_request(c);
        if (c->fd >= 0 && found[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) take_bytes(c);
    }
}

int main(int count, char **words) {
    const char *body = NULL, *key = "none";
    for (int option; (option = getopt(count, words, "p:b:c:d:w:e:i:k:")) != -1;) switch (option) {
        case 'p': port = atoi(optarg); break;
        case 'b': body = optarg; break;
        case 'c': clients = atoi(optarg); break;
        case 'd': lasts_s = atof(optarg); break;
        case 'w': warm_s = atof(optarg); break;
        case 'e': expected = atoi(optarg); break;
        case 'i': interval_s = atof(optarg) * 1e-6; break;
        case 'k': key = optarg; break;
        default: return 2;
    }
    if (!body || !port || clients < 1) return 2;
    signal(SIGPIPE, SIG_IGN);
    all = calloc(clients, sizeof *all);
    read_body(body, key);
    poller = epoll_create1(0);
    struct timespec today;
    clock_gettime(CLOCK_REALTIME, &today);
    number = today.tv_sec * 1000000ul + today.tv_nsec / 1000; /* no two runs send the same */
    double began = now();
    open_more();
    while (started < clients || opening) {
        run(began + GIVE_UP_S);
        if (now() > began + GIVE_UP_S) {
            fprintf(stderr, "only %d of %d clients had a first byte\n", started - opening, clients);
            return 1;
        }
    }
    for (double until = now() + warm_s; now() < until;) run(until);
    opens = now();
    shuts = opens + lasts_s;
    printf("begin\n");
    fflush(stdout);
    while (now() < shuts) run(shuts);
    report();
    stopping = true;
    if (!interval_s) for (double until = now() + DRAIN_S; live && now() < until;) run(until);
    return 0;
}
