//go:build kvport_fault

package fault

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

// hooks is what tests have set; a test build alone has it.
var hooks sync.Map // string -> func() error

// orders is what the environment says.
var orders = sync.OnceValue(func() map[string][]order { return parse(os.Getenv(Orders)) })

type order struct {
	k      int // 0: every hit
	action string
}

// parse reads orders and leaves out what it does not understand: a test sees that nothing fired.
func parse(text string) map[string][]order {
	out := map[string][]order{}
	for one := range strings.SplitSeq(text, ",") {
		parts := strings.Split(one, ":")
		if len(parts) != 3 {
			continue
		}
		k, err := strconv.Atoi(parts[1])
		if err == nil && k > 0 || parts[1] == "*" {
			out[parts[0]] = append(out[parts[0]], order{k, parts[2]})
		}
	}
	return out
}

// Environment names the variables that a host hands on to its plugins.
func Environment() []string { return []string{Orders, Folder} }

// Crash is a Point where no error can be returned.
func Crash(name string) { _ = Point(name) }

// Point is a place named name at which a test build may return an error, stop or kill the process.
func Point(name string) error {
	if hook, ok := hooks.Load(name); ok {
		if f, ok := hook.(func() error); ok {
			return f()
		}
	}
	folder := os.Getenv(Folder)
	if folder == "" {
		return nil
	}
	n := count(folder, name)
	for _, o := range orders()[name] {
		if o.k == 0 || o.k == n {
			return act(folder, name, n, o.action)
		}
	}
	return nil
}

// count notes a hit and says which it is. The lock makes that exact over all processes.
func count(folder, name string) int {
	f, err := os.OpenFile(filepath.Join(folder, name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return -1
	}
	defer f.Close()
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		return -1
	}
	_, _ = f.Write([]byte{'.'})
	st, err := f.Stat()
	if err != nil {
		return -1
	}
	return int(st.Size())
}

// act carries an order out. That it does is noted first: a dead process cannot.
func act(folder, name string, n int, action string) error {
	if f, err := os.OpenFile(filepath.Join(folder, Fired), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600); err == nil {
		_, _ = fmt.Fprintf(f, "%s %d %s %d\n", name, n, action, os.Getpid())
		_ = f.Close()
	}
	errno := map[string]syscall.Errno{"EIO": syscall.EIO, "ENOSPC": syscall.ENOSPC, "EROFS": syscall.EROFS}
	switch action {
	case "kill":
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	case "stop":
		_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
		return nil
	case "error":
		return fmt.Errorf("%s: %w", name, ErrInjected)
	}
	if e, ok := errno[action]; ok {
		return fmt.Errorf("%s: %w: %w", name, ErrInjected, e)
	}
	return nil
}

// Set hooks the point named name until the returned function is called. The hook runs on the
// goroutine that reaches the point.
func Set(name string, hook func() error) (unset func()) {
	hooks.Store(name, hook)
	return func() { hooks.Delete(name) }
}
