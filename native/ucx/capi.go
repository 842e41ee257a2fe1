//go:build cgo && linux && (amd64 || arm64)

package ucx

/*
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "capi.h"
#cgo nocallback kvport_ucx_poll
#cgo noescape kvport_ucx_poll
#cgo nocallback kvport_ucx_progress
#cgo noescape kvport_ucx_progress
*/
import "C"

import (
	"unsafe"
)

// handle is one of UCX's objects.
type handle = unsafe.Pointer

// library is the table of UCX's functions, in C's memory. Its methods are the calls, one to one; they check
// nothing, and the caller sees to it that those of one worker take turns.
type library struct{ table *C.ux_table }

func load(path string) (*library, *failure) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	var reason, symbol *C.char
	table := C.kvport_ucx_load(name, &reason, &symbol)
	if table == nil {
		defer C.free(unsafe.Pointer(reason))
		return nil, loadError(path, C.GoString(symbol), C.GoString(reason))
	}
	return &library{table}, nil
}

func errorOf(status C.int) error {
	if status >= 0 {
		return nil
	}
	return StatusError(status)
}

func (l *library) version() string { return C.GoString(C.kvport_ucx_version(l.table)) }

func (l *library) newWorker(o Options) (context, worker handle, err error) {
	transports, devices := C.CString(o.Transports), C.CString(o.Devices)
	defer C.free(unsafe.Pointer(transports))
	defer C.free(unsafe.Pointer(devices))
	var c, w C.ux_handle
	err = errorOf(C.kvport_ucx_worker(l.table, transports, devices, &c, &w))
	return handle(c), handle(w), err
}

func (l *library) freeWorker(context, worker handle) {
	C.kvport_ucx_free_worker(l.table, C.ux_handle(context), C.ux_handle(worker))
}

func (l *library) address(worker handle) ([]byte, error) {
	var data unsafe.Pointer
	var size C.size_t
	if err := errorOf(C.kvport_ucx_address(l.table, C.ux_handle(worker), &data, &size)); err != nil {
		return nil, err
	}
	defer C.kvport_ucx_free_address(l.table, C.ux_handle(worker), data)
	return C.GoBytes(data, C.int(size)), nil
}

func (l *library) progress(worker handle) bool {
	return C.kvport_ucx_progress(l.table, C.ux_handle(worker)) != 0
}

func (l *library) fd(worker handle) (int, error) {
	var fd C.int
	err := errorOf(C.kvport_ucx_fd(l.table, C.ux_handle(worker), &fd))
	return int(fd), err
}

func (l *library) arm(worker handle) (bool, error) {
	status := C.kvport_ucx_arm(l.table, C.ux_handle(worker))
	if status == C.UX_BUSY {
		return false, nil
	}
	return status == C.UX_OK, errorOf(status)
}

func (l *library) mapMemory(context handle, b []byte) (handle, error) {
	var h C.ux_handle
	err := errorOf(C.kvport_ucx_map(l.table, C.ux_handle(context), unsafe.Pointer(&b[0]), C.size_t(len(b)), &h))
	return handle(h), err
}

func (l *library) unmap(context, memory handle) error {
	return errorOf(C.kvport_ucx_unmap(l.table, C.ux_handle(context), C.ux_handle(memory)))
}

func (l *library) pack(context, memory handle) ([]byte, error) {
	var data unsafe.Pointer
	var size C.size_t
	if err := errorOf(C.kvport_ucx_pack(l.table, C.ux_handle(context), C.ux_handle(memory), &data, &size)); err != nil {
		return nil, err
	}
	defer C.kvport_ucx_free_packed(l.table, data)
	return C.GoBytes(data, C.int(size)), nil
}

func (l *library) unpack(endpoint handle, packed []byte) (handle, error) {
	var h C.ux_handle
	err := errorOf(C.kvport_ucx_unpack(l.table, C.ux_handle(endpoint), unsafe.Pointer(&packed[0]), &h))
	return handle(h), err
}

func (l *library) freeKey(key handle) { C.kvport_ucx_free_key(l.table, C.ux_handle(key)) }

func (l *library) connect(worker handle, address []byte, peerErrors bool) (handle, error) {
	var how C.int
	if peerErrors {
		how = 1
	}
	var h C.ux_handle
	err := errorOf(C.kvport_ucx_connect(l.table, C.ux_handle(worker), unsafe.Pointer(&address[0]), how, &h))
	return handle(h), err
}

func (l *library) closeEndpoint(endpoint handle, force bool) (handle, error) {
	var flags C.uint32_t
	if force {
		flags = C.UX_CLOSE_FORCE
	}
	var r C.ux_request
	err := errorOf(C.kvport_ucx_close(l.table, C.ux_handle(endpoint), flags, &r))
	return handle(r), err
}

func (l *library) flush(endpoint handle) (handle, error) {
	var r C.ux_request
	err := errorOf(C.kvport_ucx_flush(l.table, C.ux_handle(endpoint), &r))
	return handle(r), err
}

func (l *library) move(endpoint handle, m *movement) (handle, error) {
	q := C.ux_move{
		local: unsafe.Pointer(&m.local[0]), len: C.size_t(len(m.local)), remote: C.uint64_t(m.remote),
		memory: C.ux_handle(m.memory), key: C.ux_handle(m.key),
	}
	if m.get {
		q.get = 1
	}
	var r C.ux_request
	err := errorOf(C.kvport_ucx_move(l.table, C.ux_handle(endpoint), &q, &r))
	return handle(r), err
}

func (l *library) send(endpoint handle, data []byte, tag uint64) (handle, error) {
	var r C.ux_request
	err := errorOf(C.kvport_ucx_send(l.table, C.ux_handle(endpoint), unsafe.Pointer(unsafe.SliceData(data)), C.size_t(len(data)), C.uint64_t(tag), &r))
	return handle(r), err
}

func (l *library) receive(worker handle, data []byte, tag, mask uint64) (handle, error) {
	var r C.ux_request
	err := errorOf(C.kvport_ucx_receive(l.table, C.ux_handle(worker), unsafe.Pointer(unsafe.SliceData(data)), C.size_t(len(data)), C.uint64_t(tag), C.uint64_t(mask), &r))
	return handle(r), err
}

// poll frees the request if it reports that it has ended.
func (l *library) poll(worker, request handle, receive bool) (done bool, got received, err error) {
	var c C.ux_received
	var out *C.ux_received
	if receive {
		out = &c
	}
	status := C.kvport_ucx_poll(l.table, C.ux_handle(worker), C.ux_request(request), out)
	return status != C.UX_IN_PROGRESS, received{uint64(c.length), uint64(c.tag)}, errorOf(status)
}

func (l *library) cancel(worker, request handle) {
	C.kvport_ucx_cancel(l.table, C.ux_handle(worker), C.ux_request(request))
}
