//go:build kvport_fault

package fault

import "sync"

// hooks is what tests have set; a test build alone has it.
var hooks sync.Map // string -> func() error

// Point is a place named name at which a test build may return an error, block or kill the process.
func Point(name string) error {
	if hook, ok := hooks.Load(name); ok {
		return hook.(func() error)()
	}
	return nil
}

// Set hooks the point named name until the returned function is called. The hook runs on the
// goroutine that reaches the point.
func Set(name string, hook func() error) (unset func()) {
	hooks.Store(name, hook)
	return func() { hooks.Delete(name) }
}
