//go:build !kvport_fault

package fault

// Point is a place named name at which a test build may return an error, block or kill the process.
func Point(string) error { return nil }
