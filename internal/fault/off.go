//go:build !kvport_fault

package fault

// Point is a place named name at which a test build may return an error, stop or kill the process.
func Point(string) error { return nil }

// Crash is a Point where no error can be returned.
func Crash(string) {}

// Environment names the variables that a host hands on to its plugins: none.
func Environment() []string { return nil }
