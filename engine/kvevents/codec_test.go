package kvevents

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// golden are batches as vLLM's own classes encode them; golden.py says how.
func golden(t testing.TB) map[string][]byte {
	data, err := os.ReadFile("testdata/golden.json")
	require.NoError(t, err)
	texts := map[string]string{}
	require.NoError(t, json.Unmarshal(data, &texts))
	list := map[string][]byte{}
	for name, text := range texts {
		list[name], err = hex.DecodeString(text)
		require.NoError(t, err)
	}
	return list
}

// hashOf is the hash that golden.py gives block i.
func hashOf(i byte) Hash { return BytesHash(bytes.Repeat([]byte{i}, 32)) }

func stored() Event {
	return Event{
		Kind: Stored, Hashes: []Hash{hashOf(0), hashOf(1)}, Tokens: []int32{1, 2, 300, 70000, 5, 6, 7, 8}, BlockSize: 4,
		Medium: GPU, Group: -1,
	}
}

// with is a stored event with some changes.
func with(change func(*Event)) Event {
	ev := stored()
	change(&ev)
	return ev
}

// What vLLM encodes is read as it was meant, and kvport encodes the same as vLLM, byte by byte.
func TestGolden(t *testing.T) {
	want := map[string]Batch{
		"plain":  {Time: 1.5, Events: []Event{stored()}},
		"parent": {Time: 2, Events: []Event{with(func(ev *Event) { ev.Parent, ev.Group = hashOf(3), 1 })}},
		"numbers": {Time: 3, Events: []Event{with(func(ev *Event) {
			ev.Hashes, ev.Parent = []Hash{NumberHash(7), NumberHash(1<<64 - 1)}, NumberHash(1<<63)
		})}},
		"extra": {Time: 4, Events: []Event{with(func(ev *Event) {
			ev.LoRAName, ev.Group = "tuned", 0
			ev.Extra = [][]string{{Text("tuned"), "\x92\xa5image\x07", Text("salt")}, {Text("tuned")}}
		})}},
		"salt": {Time: 4, Events: []Event{with(func(ev *Event) {
			ev.Group, ev.Extra = 0, [][]string{{Text("salt")}, nil}
		})}},
		"removed": {Time: 6, Events: []Event{
			{Kind: Removed, Hashes: []Hash{hashOf(0)}, Medium: GPU, Group: 0},
			{Kind: Removed, Hashes: []Hash{hashOf(1), hashOf(2)}, Group: -1},
			{Kind: Removed, Hashes: []Hash{NumberHash(9)}, Medium: Storage, Locality: Remote, Group: 1},
		}},
		"cleared": {Time: 7, Events: []Event{{Kind: Cleared, Group: -1}}},
		"no rank": {Time: 8, Events: []Event{{Kind: Cleared, Group: -1}}},
		"empty":   {Time: 9},
		"negative": {Time: 3, Events: []Event{with(func(ev *Event) {
			ev.Hashes = []Hash{NumberHash(1<<64 - 5), NumberHash(200)}
		})}},
		"offloaded": {Time: 5, Events: []Event{
			with(func(ev *Event) { ev.Medium, ev.Locality, ev.Group = CPU, Local, 0 }),
			with(func(ev *Event) {
				ev.Hashes, ev.Tokens, ev.BlockSize, ev.Medium = []Hash{hashOf(2)}, []int32{}, 0, Storage
			}),
		}},
	}
	// Numbers without sign, and fields that are not kept.
	other := map[string]bool{"negative": true, "offloaded": true, "removed": true, "parent": true, "extra": true, "no rank": true}
	files := golden(t)
	require.Equal(t, uint64(endOfReplay), binary.BigEndian.Uint64(files["end of a replay"]))
	delete(files, "end of a replay")
	require.Len(t, files, len(want))
	for name, payload := range files {
		got, err := Decode(payload)
		require.NoError(t, err, name)
		batch := want[name]
		require.Equal(t, batch.Events, got, name)
		if !other[name] {
			again, err := batch.Append(nil)
			require.NoError(t, err)
			require.Equal(t, payload, again, name)
		}
	}
}

// Whether blocks are beside the engine is read as it was written.
func TestLocality(t *testing.T) {
	want := []Event{
		with(func(ev *Event) { ev.Medium, ev.Locality, ev.Group = Storage, Remote, 0 }),
		{Kind: Removed, Hashes: []Hash{hashOf(0)}, Medium: Storage, Locality: Local, Group: -1},
	}
	payload, err := (&Batch{Time: 1, Events: want}).Append(nil)
	require.NoError(t, err)
	got, err := Decode(payload)
	require.NoError(t, err)
	require.Equal(t, want, got)
}

func TestHash(t *testing.T) {
	require.True(t, Hash{}.IsZero())
	require.NotEqual(t, NumberHash(1), BytesHash([]byte("\x00\x00\x00\x00\x00\x00\x00\x01")))
	require.NotEqual(t, NumberHash(1).AppendTo(nil), BytesHash([]byte("\x00\x00\x00\x00\x00\x00\x00\x01")).AppendTo(nil))
	require.Equal(t, "18446744073709551611", NumberHash(1<<64-5).String())
	require.Equal(t, "00ff", BytesHash([]byte{0, 255}).String())
}

// Every payload that is no batch is refused with one line that says what is wrong.
func TestRefusals(t *testing.T) {
	head := "93cb3ff0000000000000" // three values, a time
	field := func(name string) string { return hex.EncodeToString([]byte(Text(name))) }
	storedWith := func(name, value string) string {
		return head + "9182" + field("type") + field("BlockStored") + field(name) + value + "00"
	}
	for payload, message := range map[string]string{
		"":                                 "it ends too soon",
		"91cb3ff0000000000000":             "want time and events",
		"80":                               "the batch is no array",
		"92cb3ff0000000000000c0":           "the list of events is no array",
		head + "9000ff":                    "1 bytes follow the batch",
		head + "9300":                      "values, want at most",
		head + "919100":                    "an event is no map with a type",
		head + "9180":                      "has 0 fields",
		head + "91de0fff":                  "has 4095 fields",
		storedWith("block_hashes", "91c0"): "a block has no hash",
		storedWith("block_hashes", "91a0"): "a block's hash is empty",
		storedWith("block_hashes", "91c3"): "neither a number nor bytes",
		storedWith("block_hashes", "91c6ffffffff"):      "want at most",
		storedWith("block_hashes", "ddffffffff"):        "want at most",
		storedWith("token_ids", "91ff"):                 "a token's id is -1",
		storedWith("token_ids", "9101"):                 "block_size 0",
		storedWith("token_ids", "91cf8000000000000000"): "a token's id is -9223372036854775808",
		storedWith("block_size", "ce00010001"):          "block_size is 65537",
		storedWith("extra_keys", "91c0"):                "extra_keys has 1 entries for 0 blocks",
		storedWith("medium", "01"):                      "medium is no text",
		storedWith("lora_name", "c4"):                   "lora_name is no text",
		storedWith("unknown", strings.Repeat("91", 20)): "nested too deeply",
		storedWith("unknown", "dfffffffff"):             "ends too soon",
	} {
		b, err := hex.DecodeString(payload)
		require.NoError(t, err, payload)
		_, err = Decode(b)
		require.ErrorIs(t, err, ErrFormat, payload)
		require.ErrorContains(t, err, message, payload)
	}
	_, err := (&Batch{Events: []Event{{}}}).Append(nil)
	require.ErrorContains(t, err, "event 0: kind 0 is unknown")
	_, err = (&Batch{Events: []Event{{Kind: Stored, Hashes: []Hash{hashOf(0)}, Extra: [][]string{}}}}).Append(nil)
	require.ErrorContains(t, err, "1 blocks have 0 entries")
}

// A batch takes memory in proportion to its length only up to a limit.
func TestManyValues(t *testing.T) {
	ev := Event{Kind: Removed, Group: -1}
	for range maxHashes {
		ev.Hashes = append(ev.Hashes, NumberHash(1))
	}
	b, err := (&Batch{Events: []Event{ev, ev, ev, ev}}).Append(nil)
	require.NoError(t, err)
	_, err = Decode(b)
	require.NoError(t, err)
	b, err = (&Batch{Events: []Event{ev, ev, ev, ev, ev}}).Append(nil)
	require.NoError(t, err)
	_, err = Decode(b)
	require.ErrorContains(t, err, "over 262144 hashes")
}

// What a client chooses, such as its cache_salt, costs its own blocks their place, not the whole batch.
func TestLongExtraKeys(t *testing.T) {
	long, many := Text(strings.Repeat("s", maxValue+1)), make([]string, maxExtra+1)
	for i := range many {
		many[i] = Text("image")
	}
	for name, values := range map[string][]string{"long": {Text("tuned"), long, Text("x")}, "many": many} {
		b, err := (&Batch{Events: []Event{with(func(ev *Event) { ev.Extra = [][]string{values, {Text("x")}} }), stored()}}).Append(nil)
		require.NoError(t, err)
		got, err := Decode(b)
		require.NoError(t, err, name)
		require.Equal(t, [][]string{{""}, {Text("x")}}, got[0].Extra, name)
		require.Equal(t, stored(), got[1], name)
	}
}

// Whatever a publisher sends is refused, or is a batch that can be sent on and read again.
func FuzzDecode(f *testing.F) {
	for _, payload := range golden(f) {
		f.Add(payload)
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		events, err := Decode(payload)
		if err != nil {
			require.ErrorIs(t, err, ErrFormat)
			return
		}
		again, err := (&Batch{Events: events}).Append(nil)
		require.NoError(t, err)
		second, err := Decode(again)
		require.NoError(t, err)
		third, err := (&Batch{Events: second}).Append(nil)
		require.NoError(t, err)
		require.Equal(t, again, third)
	})
}
