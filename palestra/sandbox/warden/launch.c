/* The outer half: joins the cgroups, makes a mount namespace of its own, stacks the layers under a writable one of limited
   size, gives up root, and becomes bwrap. All mounts live in that namespace, so nothing is left when its last process ends.

   warden launch [cgroup=FILE]... [layer=FOLDER]... [uid=N] [from=N] [user=1] [size=BYTES] [inodes=N] [upper=FOLDER]
                 [filter=FILE] -- BWRAP ARGUMENT... */
#define _GNU_SOURCE
#include "warden.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/mount.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define MOST 64
#define STAGE "/tmp" /* exists everywhere and may be entered by anyone; in our namespace it is ours alone */

static struct {
    const char *cgroups[MOST], *layers[MOST], *size, *inodes, *upper, *filter;
    int cgroup_count, layer_count, user;
    unsigned uid, from; /* the uid to run as, and the one that owns the files of the layers */
} plan = {.size = "67108864", .inodes = "16384"};

_Noreturn void fail(const char *what) {
    dprintf(2, "warden: %s: %s\n", what, strerror(errno));
    _exit(125);
}

static void put(const char *file, const char *text) {
    int fd = open(file, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, text, strlen(text)) < 0) fail(file);
    close(fd);
}

static char **read_plan(int argc, char **argv) {
    for (int i = 0; i < argc; i++) {
        char *value = strchr(argv[i], '=');
        if (!strcmp(argv[i], "--")) return argv + i + 1;
        if (!value) break;
        *value++ = 0;
        if (!strcmp(argv[i], "cgroup") && plan.cgroup_count < MOST) plan.cgroups[plan.cgroup_count++] = value;
        else if (!strcmp(argv[i], "layer") && plan.layer_count < MOST) plan.layers[plan.layer_count++] = value;
        else if (!strcmp(argv[i], "uid")) plan.uid = strtoul(value, NULL, 10);
        else if (!strcmp(argv[i], "from")) plan.from = strtoul(value, NULL, 10);
        else if (!strcmp(argv[i], "user")) plan.user = 1;
        else if (!strcmp(argv[i], "size")) plan.size = value;
        else if (!strcmp(argv[i], "inodes")) plan.inodes = value;
        else if (!strcmp(argv[i], "upper")) plan.upper = value;
        else if (!strcmp(argv[i], "filter")) plan.filter = value;
        else break;
    }
    errno = EINVAL;
    fail("arguments");
}

static void keep(int fd, int at) {
    if (fd < 0) fail("a descriptor");
    if (fd == at) { /* dup2 would keep close-on-exec */
        fcntl(fd, F_SETFD, 0);
        return;
    }
    if (dup2(fd, at) < 0) fail("a descriptor");
    close(fd);
}

static void enter_namespaces(void) {
    char line[64];
    unsigned uid = getuid(), gid = getgid();
    if (unshare(CLONE_NEWNS | (plan.user ? CLONE_NEWUSER : 0))) fail("unshare");
    if (plan.user) {
        put("/proc/self/setgroups", "deny");
        snprintf(line, sizeof line, "0 %u 1", uid);
        put("/proc/self/uid_map", line);
        snprintf(line, sizeof line, "0 %u 1", gid);
        put("/proc/self/gid_map", line);
    }
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) fail("private mounts");
}

/* A user namespace that shows the layers' owner as the uid of this sandbox, and leaves root alone. */
static int id_map(void) {
    int gate[2];
    char path[64], map[96];
    if (pipe2(gate, O_CLOEXEC)) fail("pipe");
    pid_t child = fork();
    if (child < 0) fail("fork");
    if (!child) {
        if (unshare(CLONE_NEWUSER)) _exit(1);
        if (write(gate[1], "x", 1) != 1) _exit(1);
        pause();
        _exit(0);
    }
    if (read(gate[0], map, 1) != 1) fail("id map");
    snprintf(map, sizeof map, "0 0 1\n%u %u 1\n", plan.from, plan.uid);
    snprintf(path, sizeof path, "/proc/%d/uid_map", child);
    put(path, map);
    snprintf(path, sizeof path, "/proc/%d/gid_map", child);
    put(path, map);
    snprintf(path, sizeof path, "/proc/%d/ns/user", child);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) fail("id map");
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    close(gate[0]);
    close(gate[1]);
    return fd;
}

static int clone_mount(const char *path, int users) {
    int fd = syscall(SYS_open_tree, AT_FDCWD, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    if (fd < 0) fail(path);
    struct mount_attr attr = {.attr_set = MOUNT_ATTR_IDMAP, .userns_fd = users};
    if (users >= 0 && syscall(SYS_mount_setattr, fd, "", AT_EMPTY_PATH, &attr, sizeof attr)) fail("id-mapped layer");
    return fd;
}

static void place(int mounted, const char *name) {
    if (mkdir(name, 0755) || syscall(SYS_move_mount, mounted, "", AT_FDCWD, name, MOVE_MOUNT_F_EMPTY_PATH)) fail(name);
    close(mounted);
}

/* Names are relative, so that the sandbox's mountinfo tells nothing of the host's folders. */
static void stack_layers(void) {
    char options[4096] = "lowerdir=", name[16], limits[128];
    int layers[MOST], users = plan.from != plan.uid ? id_map() : -1, upper = -1;
    for (int i = 0; i < plan.layer_count; i++) layers[i] = clone_mount(plan.layers[i], users);
    if (users >= 0) close(users);
    if (plan.upper) upper = clone_mount(plan.upper, -1);
    snprintf(limits, sizeof limits, "size=%s,nr_inodes=%s,mode=755", plan.size, plan.inodes);
    if (mount("tmpfs", STAGE, "tmpfs", MS_NOSUID | MS_NODEV, limits) || chdir(STAGE)) fail("the writable layer");
    for (int i = 0; i < plan.layer_count; i++) {
        snprintf(name, sizeof name, "l%d", i);
        place(layers[i], name);
        if (i) strcat(options, ":");
        strcat(options, name);
    }
    if (plan.upper) place(upper, "d");
    else if (mkdir("d", 0755) || mkdir("d/u", 0555) || mkdir("d/w", 0755)) fail("the writable layer");
    strcat(options, ",upperdir=d/u,workdir=d/w");
    if (plan.user) strcat(options, ",userxattr");
    int empty = open("empty", O_CREAT | O_WRONLY | O_CLOEXEC, 0444);
    if (empty < 0 || close(empty) || mkdir("root", 0755)) fail("the writable layer");
    if (mount("overlay", "root", "overlay", MS_NOSUID | MS_NODEV, options)) fail("overlay");
}

int launch(int argc, char **argv) {
    char **command = read_plan(argc, argv);
    syscall(SYS_close_range, CONTROL + 1, ~0U, 0);
    for (int i = 0; i < plan.cgroup_count; i++) put(plan.cgroups[i], "0");
    /* Short of memory, the host takes a sandbox before anything else. What root has set, nobody inside can lower. */
    if (!plan.user) put("/proc/self/oom_score_adj", "500");
    keep(open("/proc/self/exe", O_RDONLY), SELF);
    if (plan.filter) keep(open(plan.filter, O_RDONLY), FILTER);
    int program = fcntl(open(command[0], O_RDONLY | O_CLOEXEC), F_DUPFD_CLOEXEC, 16);
    if (program < 0) fail(command[0]);
    enter_namespaces();
    stack_layers();
    if (chdir("/")) fail("/");
    if (plan.uid && (setgroups(0, NULL) || setresgid(plan.uid, plan.uid, plan.uid) || setresuid(plan.uid, plan.uid, plan.uid)))
        fail("giving up root");
    fexecve(program, command, environ);
    fail(command[0]);
}

int main(int argc, char **argv) {
    if (argc > 2 && !strcmp(argv[1], "launch")) return launch(argc - 2, argv + 2);
    if (argc > 2 && !strcmp(argv[1], "join")) return join(argc - 2, argv + 2);
    if (argc > 2 && !strcmp(argv[1], "supervise")) return supervise(argc - 2, argv + 2);
    errno = EINVAL;
    fail("arguments");
}
