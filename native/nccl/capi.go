//go:build cgo && linux && (amd64 || arm64)

package nccl

/*
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "capi.h"
*/
import "C"

import (
	"fmt"
	"unsafe"
)

// library is the table of the library's functions, in C's memory. Its methods are the calls, one to one.
type library struct{ table *C.ncx_table }

func load(path string) (*library, *failure) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	var reason, symbol *C.char
	table := C.kvport_nccl_load(name, &reason, &symbol)
	if table == nil {
		defer C.free(unsafe.Pointer(reason))
		return nil, binding().Fail(path, C.GoString(symbol), C.GoString(reason))
	}
	return &library{table}, nil
}

func (l *library) error(code C.int) error {
	if code == C.NCX_OK || code == C.NCX_IN_PROGRESS {
		return nil
	}
	return explain(int(code), C.GoString(C.kvport_nccl_text(l.table, code)), C.GoString(C.kvport_nccl_last(l.table)))
}

func (l *library) version() (int, error) {
	var v C.int
	err := l.error(C.kvport_nccl_version(l.table, &v))
	return int(v), err
}

func (l *library) newID() (ID, error) {
	var id ID
	err := l.error(C.kvport_nccl_id(l.table, (*C.ncx_id)(unsafe.Pointer(&id))))
	return id, err
}

func (l *library) join(id ID, ranks, rank int) (unsafe.Pointer, error) {
	if C.kvport_nccl_driver() == 0 {
		return nil, fmt.Errorf("%w: there is no driver (libcuda.so.1)", ErrNoDevice)
	}
	var comm unsafe.Pointer
	err := l.error(C.kvport_nccl_join(l.table, (*C.ncx_id)(unsafe.Pointer(&id)), C.int(ranks), C.int(rank), &comm))
	return comm, err
}

func (l *library) send(comm, from unsafe.Pointer, n, rank int, stream unsafe.Pointer) error {
	return l.error(C.kvport_nccl_send(l.table, comm, from, C.size_t(n), C.int(rank), stream))
}

func (l *library) receive(comm, to unsafe.Pointer, n, rank int, stream unsafe.Pointer) error {
	return l.error(C.kvport_nccl_receive(l.table, comm, to, C.size_t(n), C.int(rank), stream))
}

func (l *library) group(start bool) error {
	var s C.int
	if start {
		s = 1
	}
	return l.error(C.kvport_nccl_group(l.table, s))
}

func (l *library) state(comm unsafe.Pointer) error {
	var state C.int
	if err := l.error(C.kvport_nccl_state(l.table, comm, &state)); err != nil {
		return err
	}
	return l.error(state)
}

func (l *library) leave(comm unsafe.Pointer, abort bool) error {
	var a C.int
	if abort {
		a = 1
	}
	return l.error(C.kvport_nccl_leave(l.table, comm, a))
}
