//go:build cgo && linux && (amd64 || arm64)

package cuda

/*
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "capi.h"
*/
import "C"

import "unsafe"

// library is the table of the library's functions, in C's memory. Its methods are the calls, one to one.
type library struct{ table *C.cx_table }

func load(path string) (*library, *failure) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	var reason, symbol *C.char
	table := C.kvport_cuda_load(name, &reason, &symbol)
	if table == nil {
		defer C.free(unsafe.Pointer(reason))
		return nil, binding().Fail(path, C.GoString(symbol), C.GoString(reason))
	}
	return &library{table}, nil
}

func (l *library) error(code C.int) error {
	switch code {
	case 0:
		return nil
	case C.CX_NO_DRIVER, C.CX_NO_DEVICE:
		return ErrNoDevice
	}
	return &CodeError{int(code), C.GoString(C.kvport_cuda_text(l.table, code))}
}

func (l *library) version() (int, error) {
	var v C.int
	err := l.error(C.kvport_cuda_version(l.table, &v))
	return int(v), err
}

func (l *library) devices() (int, error) {
	var n C.int
	err := l.error(C.kvport_cuda_devices(l.table, &n))
	return int(n), err
}

func (l *library) malloc(device, n int) (Pointer, error) {
	var p unsafe.Pointer
	err := l.error(C.kvport_cuda_malloc(l.table, C.int(device), &p, C.size_t(n)))
	return p, err
}

func (l *library) free(device int, p Pointer) error {
	return l.error(C.kvport_cuda_free(l.table, C.int(device), p))
}

func (l *library) copyIn(device int, to Pointer, from []byte) error {
	return l.error(C.kvport_cuda_copy(l.table, C.int(device), to, unsafe.Pointer(&from[0]), C.size_t(len(from)), C.CX_TO_DEVICE))
}

func (l *library) copyOut(device int, to []byte, from Pointer) error {
	return l.error(C.kvport_cuda_copy(l.table, C.int(device), unsafe.Pointer(&to[0]), from, C.size_t(len(to)), C.CX_TO_HOST))
}

func (l *library) export(device int, p Pointer) (Handle, error) {
	var h Handle
	err := l.error(C.kvport_cuda_export(l.table, C.int(device), p, (*C.cx_ipc)(unsafe.Pointer(&h))))
	return h, err
}

func (l *library) imports(device int, h Handle) (Pointer, error) {
	var p unsafe.Pointer
	err := l.error(C.kvport_cuda_import(l.table, C.int(device), (*C.cx_ipc)(unsafe.Pointer(&h)), &p))
	return p, err
}

func (l *library) unimport(device int, p Pointer) error {
	return l.error(C.kvport_cuda_unimport(l.table, C.int(device), p))
}

func (l *library) stream(device int) (Stream, error) {
	var s unsafe.Pointer
	err := l.error(C.kvport_cuda_stream(l.table, C.int(device), &s))
	return s, err
}

func (l *library) freeStream(s Stream) error { return l.error(C.kvport_cuda_free_stream(l.table, s)) }

func (l *library) wait(s Stream) error { return l.error(C.kvport_cuda_wait(l.table, s)) }
