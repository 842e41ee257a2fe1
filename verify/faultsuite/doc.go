// Package faultsuite provokes a fault at every failpoint of docs/failpoints.md and at every hit of it
// and looks at what is left: tokens equal to those of an engine without a connector, no request lost,
// no process, socket or block left behind, no torn file in the store. Its tests need the build tag
// kvport_fault.
package faultsuite
