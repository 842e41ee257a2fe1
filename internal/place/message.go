package place

import "github.com/kvport/kvport/connector"

// Opening is what the host tells a new life of the plugin.
type Opening struct {
	Epoch  uint64 // of the last reset: what is older is not kept
	Serial uint64 // the last one that was drawn: a header with a higher one was not written by this host
}

// Part is one of the parts of a block: one shard of one group.
type Part struct {
	Key    connector.StoreKey
	Length uint32
	Group  uint16
}

// Request asks the plugin for slots for all parts of a block that the host is about to save.
type Request struct {
	Serial  uint64 // names the save, and orders saves of one key
	Epoch   uint64
	Tenant  uint64
	Replace bool // also if the block is known: the host found it damaged
	Parts   []Part
}

// Verdict is what a plugin says to a Request.
type Verdict uint8

// The verdicts.
const (
	Declined Verdict = iota + 1
	Granted          // Slots are lent
	Known            // Slots hold the block already
)

// Answer answers a Request. Slots are in the order of its parts; none if it is declined.
type Answer struct {
	Verdict Verdict
	Slots   []Slot
	Expires int64 // of what is saved, in Unix ms; 0: never
}

// Notice tells the host that a block is resident which the host did not save: one that was promoted, or found after a
// start. Slots are in the order of its parts.
type Notice struct{ Slots []Slot }

// Return tells the plugin that the host has stopped writing the slots of a save that did not end, or that it does not
// want them. The host sends one for each Request whose save did not succeed.
type Return struct{ Serial uint64 }
