// Package fault marks places in the code at which tests provoke failures: failpoints. In a normal
// build a mark costs nothing and does nothing; a build with the tag kvport_fault lets a test hook it,
// or say by environment what happens at which hit. docs/failpoints.md lists all of them.
package fault

import "errors"

// Environment variables that a build with the tag kvport_fault reads, and hosts hand on to plugins.
const (
	// Orders says what happens where: NAME:K:ACTION, several with commas between. At the K-th hit of
	// the point NAME, or at every one if K is *, ACTION is one of
	//
	//	kill         the process kills itself with SIGKILL
	//	stop         the process stops itself with SIGSTOP
	//	error        Point returns ErrInjected
	//	EIO, ENOSPC, EROFS   Point returns that error
	//
	// At a Crash an error has no effect.
	Orders = "KVPORT_FAULTS"
	// Folder is where hits are counted, over all processes that are told the same folder: the file
	// NAME has one byte for each hit, and the file Fired one line for each order that was carried out.
	Folder = "KVPORT_FAULT_DIR"
	// Fired is the name of that file.
	Fired = "fired"
)

// ErrInjected is the error of a Point that was told to fail.
var ErrInjected = errors.New("injected fault")
