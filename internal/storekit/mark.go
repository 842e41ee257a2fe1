package storekit

import "github.com/kvport/kvport/connector"

// MarkBytes is the length of a Mark.
const MarkBytes = 16

// Mark is how the digests of an item begin: it names the edition and the key that made them. at is where it lies among the
// item's bytes. It is nil if the item's last span does not begin like digests.
//
// A store that skips blocks it has compares it with what is stored, and the length too. Where they differ, the block was made by
// another version or with another key. Engines that lack that key cannot use it, and an engine that only saves never finds out.
func Mark(it connector.Item) (mark []byte, at int) {
	last := len(it.Spans) - 1
	if last < 0 || len(it.Spans[last]) < MarkBytes {
		return nil, 0
	}
	mark = it.Spans[last][:MarkBytes]
	if mark[0] == 0 || [7]byte(mark[1:8]) != [7]byte{} {
		return nil, 0
	}
	return mark, it.Size() - len(it.Spans[last])
}
