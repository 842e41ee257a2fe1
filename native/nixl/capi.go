//go:build cgo && linux && (amd64 || arm64)

package nixl

/*
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "capi.h"
#cgo nocallback kvport_nixl_poll
#cgo noescape kvport_nixl_poll
#cgo nocallback kvport_nixl_post
#cgo noescape kvport_nixl_post
*/
import "C"

import (
	"strings"
	"time"
	"unsafe"
)

// handle is one of NIXL's objects.
type handle = unsafe.Pointer

// A []Region is handed to C as it is.
var _ = [1]struct{}{}[unsafe.Sizeof(Region{})-unsafe.Sizeof(C.nx_region{})]

// library is the table of NIXL's functions, in C's memory. Its methods are the calls, one to one; they
// check nothing.
type library struct{ table *C.nx_table }

func load(path string) (*library, *failure) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	var reason, symbol *C.char
	table := C.kvport_nixl_load(name, &reason, &symbol)
	if table == nil {
		defer C.free(unsafe.Pointer(reason))
		return nil, loadError(path, C.GoString(symbol), C.GoString(reason))
	}
	return &library{table}, nil
}

func errorOf(status C.nx_status) error {
	if status == 0 {
		return nil
	}
	return statusError(int(status))
}

func (l *library) newAgent(name string, o Options) (handle, error) {
	s := C.CString(name)
	defer C.free(unsafe.Pointer(s))
	config := C.nx_config{
		progress_thread:   C.bool(o.Progress > 0),
		progress_delay_us: C.uint64_t(o.Progress.Microseconds()),
		thread_sync:       C.NX_STRICT,
		workers:           1,
		listen_delay_us:   100_000,
		telemetry:         C.bool(o.Telemetry),
	}
	var h C.nx_handle
	err := errorOf(C.kvport_nixl_create_agent(l.table, s, &config, &h))
	return handle(h), err
}

func (l *library) freeAgent(agent handle) error {
	return errorOf(C.kvport_nixl_destroy_agent(l.table, C.nx_handle(agent)))
}

func (l *library) plugins(agent handle) ([]string, error) {
	var list C.nx_handle
	var count C.size_t
	err := errorOf(C.kvport_nixl_plugins(l.table, C.nx_handle(agent), &list, &count))
	defer C.kvport_nixl_free_plugins(l.table, list)
	if err != nil {
		return nil, err
	}
	names := make([]string, 0, int(count))
	for i := range count {
		var s *C.char
		if err := errorOf(C.kvport_nixl_plugin(l.table, list, i, &s)); err != nil {
			return nil, err
		}
		names = append(names, C.GoString(s))
	}
	return names, nil
}

// newBackend starts a backend; pairs are keys and values in turn.
func (l *library) newBackend(agent handle, name string, pairs []string) (handle, error) {
	s := C.CString(name)
	defer C.free(unsafe.Pointer(s))
	size := C.size_t(unsafe.Sizeof(s))
	array := (**C.char)(C.calloc(C.size_t(len(pairs)+1), size))
	defer C.free(unsafe.Pointer(array))
	for i, p := range pairs {
		c := C.CString(p)
		defer C.free(unsafe.Pointer(c))
		unsafe.Slice(array, len(pairs))[i] = c
	}
	var h C.nx_handle
	err := errorOf(C.kvport_nixl_backend(l.table, C.nx_handle(agent), s, array, C.size_t(len(pairs)), &h))
	return handle(h), err
}

func (l *library) freeBackend(backend handle) error {
	return errorOf(C.kvport_nixl_destroy_backend(l.table, C.nx_handle(backend)))
}

func regionsOf(r []Region) *C.nx_region { return (*C.nx_region)(unsafe.Pointer(unsafe.SliceData(r))) }

func (l *library) register(agent, backend handle, kind Kind, r []Region) error {
	return errorOf(C.kvport_nixl_register(l.table, C.nx_handle(agent), C.nx_handle(backend), C.int(kind), regionsOf(r), C.size_t(len(r))))
}

func (l *library) deregister(agent, backend handle, kind Kind, r []Region) error {
	return errorOf(C.kvport_nixl_deregister(l.table, C.nx_handle(agent), C.nx_handle(backend), C.int(kind), regionsOf(r), C.size_t(len(r))))
}

func (l *library) metadata(agent handle) ([]byte, error) {
	var data unsafe.Pointer
	var size C.size_t
	if err := errorOf(C.kvport_nixl_metadata(l.table, C.nx_handle(agent), &data, &size)); err != nil {
		return nil, err
	}
	defer C.free(data)
	return C.GoBytes(data, C.int(size)), nil
}

func (l *library) addPeer(agent handle, metadata []byte) (string, error) {
	var name *C.char
	err := errorOf(C.kvport_nixl_load_remote(l.table, C.nx_handle(agent), unsafe.Pointer(&metadata[0]), C.size_t(len(metadata)), &name))
	if err != nil {
		return "", err
	}
	defer C.free(unsafe.Pointer(name))
	return C.GoString(name), nil
}

func (l *library) removePeer(agent handle, peer string) error {
	name := C.CString(peer)
	defer C.free(unsafe.Pointer(name))
	return errorOf(C.kvport_nixl_drop_remote(l.table, C.nx_handle(agent), name))
}

func (l *library) connect(agent handle, peer string) error {
	name := C.CString(peer)
	defer C.free(unsafe.Pointer(name))
	return errorOf(C.kvport_nixl_connect(l.table, C.nx_handle(agent), name))
}

func (l *library) notify(agent handle, peer string, message []byte) error {
	name := C.CString(peer)
	defer C.free(unsafe.Pointer(name))
	return errorOf(C.kvport_nixl_notify(l.table, C.nx_handle(agent), name, unsafe.Pointer(&message[0]), C.size_t(len(message))))
}

func (l *library) notifications(agent handle) ([]Notification, error) {
	var senders C.nx_handle
	var count C.size_t
	err := errorOf(C.kvport_nixl_notifications(l.table, C.nx_handle(agent), &senders, &count))
	defer C.kvport_nixl_free_notifications(l.table, senders)
	if err != nil || count == 0 {
		return nil, err
	}
	var all []Notification
	for i := range count {
		var name *C.char
		var messages C.size_t
		if err := errorOf(C.kvport_nixl_sender(l.table, senders, i, &name, &messages)); err != nil {
			return nil, err
		}
		peer := C.GoString(name)
		for j := range messages {
			var data unsafe.Pointer
			var size C.size_t
			if err := errorOf(C.kvport_nixl_message(l.table, senders, name, j, &data, &size)); err != nil {
				return nil, err
			}
			all = append(all, Notification{Peer: peer, Message: C.GoBytes(data, C.int(size))})
		}
	}
	return all, nil
}

func (l *library) prepare(agent handle, r *Request) (handle, error) {
	peer := C.CString(strings.TrimRight(r.Peer, "\x00"))
	defer C.free(unsafe.Pointer(peer))
	var backend handle
	if r.Backend != nil {
		backend = r.Backend.handle
	}
	q := C.nx_request{
		op: C.int(r.Op), local_kind: C.int(r.LocalKind), remote_kind: C.int(r.RemoteKind),
		count: C.size_t(len(r.Local)), message_len: C.size_t(len(r.Notify)),
	}
	var h C.nx_handle
	err := errorOf(C.kvport_nixl_prepare(l.table, C.nx_handle(agent), C.nx_handle(backend), &q, regionsOf(r.Local), regionsOf(r.Remote),
		peer, unsafe.Pointer(unsafe.SliceData(r.Notify)), &h))
	return handle(h), err
}

// list prepares the regions of one end; an empty peer is the agent itself.
func (l *library) list(agent, backend handle, peer string, kind Kind, r []Region) (handle, error) {
	name := C.CString(peer)
	defer C.free(unsafe.Pointer(name))
	var h C.nx_handle
	err := errorOf(C.kvport_nixl_list(l.table, C.nx_handle(agent), C.nx_handle(backend), name, C.int(kind), regionsOf(r), C.size_t(len(r)), &h))
	return handle(h), err
}

func (l *library) freeList(agent, list handle) error {
	return errorOf(C.kvport_nixl_free_list(l.table, C.nx_handle(agent), C.nx_handle(list)))
}

// makeTransfer is of regions of two lists.
func (l *library) makeTransfer(agent handle, op Op, local, remote listed) (handle, error) {
	var h C.nx_handle
	err := errorOf(C.kvport_nixl_make(l.table, C.nx_handle(agent), C.nx_handle(local.backend.handle), C.int(op), C.nx_handle(local.handle),
		(*C.int)(unsafe.SliceData(local.places)), C.nx_handle(remote.handle), (*C.int)(unsafe.SliceData(remote.places)), C.size_t(len(local.places)), &h))
	return handle(h), err
}

// ended turns a status of a transfer into whether it has ended.
func ended(status C.nx_status) (bool, error) {
	if status == C.NX_IN_PROGRESS {
		return false, nil
	}
	return status == 0, errorOf(status)
}

func (l *library) post(agent, transfer handle) (bool, error) {
	return ended(C.kvport_nixl_post(l.table, C.nx_handle(agent), C.nx_handle(transfer)))
}

func (l *library) poll(agent, transfer handle) (bool, error) {
	return ended(C.kvport_nixl_poll(l.table, C.nx_handle(agent), C.nx_handle(transfer)))
}

func (l *library) release(agent, transfer handle) error {
	return errorOf(C.kvport_nixl_release(l.table, C.nx_handle(agent), C.nx_handle(transfer)))
}

func (l *library) telemetry(agent, transfer handle) (Telemetry, error) {
	var t C.nx_telemetry
	if err := errorOf(C.kvport_nixl_telemetry(l.table, C.nx_handle(agent), C.nx_handle(transfer), &t)); err != nil {
		return Telemetry{}, err
	}
	return Telemetry{
		Post:     time.Duration(t.post_us) * time.Microsecond,
		Duration: time.Duration(t.transfer_us) * time.Microsecond, Bytes: uint64(t.bytes), Descriptors: uint64(t.descriptors),
	}, nil
}
