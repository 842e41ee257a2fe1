package acceptance

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/testkit"
)

// blockHead is the length of the head of a block file.
const blockHead = 128

// folders are a Medium of block files; each place has a folder of its own.
func folders(r *rig.Rig) *rig.Medium {
	at := func(place string) *rig.Rig {
		other := *r
		other.Store = filepath.Join(r.Store, place)
		return &other
	}
	files := map[string]map[string]string{}
	list := func(place string) map[string]string {
		if files[place] == nil {
			files[place] = map[string]string{}
			for _, path := range at(place).BlockFiles() {
				files[place][filepath.Base(path)] = path
			}
		}
		return files[place]
	}
	return &rig.Medium{
		Head:   blockHead,
		Config: func(role, place, settings string) string { return at(place).Config(role, "", `,"kvport":`+settings) },
		Keys: func(place string) (keys []string) {
			for _, path := range at(place).BlockFiles() { // in a fixed order
				keys = append(keys, filepath.Base(path))
			}
			return keys
		},
		Get: func(place, key string) []byte {
			data, err := os.ReadFile(list(place)[key])
			require.NoError(r, err)
			return data
		},
		Set: func(place, key string, value []byte) { // a consumer removes damaged files
			require.NoError(r, os.MkdirAll(filepath.Dir(list(place)[key]), 0o700))
			require.NoError(r, os.WriteFile(list(place)[key], value, 0o600))
		},
		Whole: wholeFile,
	}
}

// wholeFile mends the head of a block file whose block has another length now.
func wholeFile(value []byte) []byte {
	binary.LittleEndian.PutUint64(value[16:], uint64(len(value)-blockHead))
	binary.LittleEndian.PutUint32(value[blockHead-4:], crc32.Checksum(value[:blockHead-4], crc32.MakeTable(crc32.Castagnoli)))
	return value
}

// TestForgedBlocks: blocks in a shared folder that somebody without the key has made, moved or downgraded are never used, and
// are counted by reason.
func TestForgedBlocks(t *testing.T) {
	r := rig.New(t)
	prompts, want := r.Forgeable(*rig.Seed + 4100)
	r.Forgeries(folders(r), prompts, want)
}

// What the log says about blocks that cannot be checked.
const (
	otherKey     = "blocks were stored with a key that is not in the ring, they count as misses"
	otherEdition = "blocks were stored by another version or with another kvport.digest, they count as misses"
)

// keysCase is an engine that saves, something that happens, and an engine that loads.
type keysCase struct {
	row     string                                // of the table: what happened
	says    string                                // its first line in the log
	seen    string                                // what that line has, too
	reason  string                                // in kvport_digest_misses_total
	saves   func(r *rig.Rig) string               // settings
	loads   func(r *rig.Rig, saved string) string // nil: those of the engine that saves
	between func(r *rig.Rig, m *rig.Medium, saved string)
}

func keysCases() map[string]keysCase {
	const xxh3 = "another engine has `\"digest\": \"xxh3\"`, and this one does not, or the reverse"
	return map[string]keysCase{
		"another machine's key": {row: "two machines have different keys", says: otherKey, reason: "foreign_key", saves: newKey, loads: anotherKey},
		"a key that was dropped": {
			row: "a key was dropped, or lost with its file", says: otherKey, reason: "foreign_key", saves: newKey,
			between: func(r *rig.Rig, _ *rig.Medium, saved string) {
				path := pathOf(saved)
				old := r.Keys(path, "list")[0]
				r.Keys(path, "rotate", "--promote", r.Keys(path, "rotate")[1])
				r.Keys(path, "rotate", "--drop", old)
			},
		},
		"a key that this machine does not read yet": {
			row: "a new key signs that this machine does not read yet", says: otherKey, reason: "foreign_key",
			saves: func(r *rig.Rig) string {
				path, _ := r.Ring()
				data, err := os.ReadFile(path)
				require.NoError(r, err)
				require.NoError(r, os.WriteFile(path+beforeRotation, data, 0o600))
				r.Keys(path, "rotate", "--promote", r.Keys(path, "rotate")[1])
				return keyFile(path)
			},
			loads: func(_ *rig.Rig, saved string) string { return keyFile(pathOf(saved) + beforeRotation) },
		},
		"a store of an earlier version": {
			row: "an earlier version has stored the block", says: otherEdition, seen: "another length", reason: "edition", saves: newKey,
			between: func(_ *rig.Rig, m *rig.Medium, _ string) {
				for _, key := range m.Keys("store") {
					value := m.Get("store", key)
					m.Set("store", key, m.Whole(value[:len(value)-16]))
				}
			},
		},
		"xxh3 and keyed": {row: xxh3, says: otherEdition, seen: "edition 1", reason: "edition", saves: plainDigests, loads: anotherKey},
		"keyed and xxh3": {row: xxh3, says: otherEdition, seen: "edition 2", reason: "edition", saves: newKey, loads: func(r *rig.Rig, _ string) string { return plainDigests(r) }},
	}
}

// TestKeysOfStores: what an operator sees whose engines have other keys, another edition or an old store is in a table of
// docs/operate.md, no token is wrong, and the second time all of it loads.
func TestKeysOfStores(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(testkit.Root(t), "docs", "operate.md"))
	require.NoError(t, err)
	for name, c := range keysCases() {
		t.Run(name, func(t *testing.T) {
			require.Contains(t, string(page), "| "+c.row+" |")
			require.Contains(t, string(page), c.says)
			r := rig.New(t)
			prompts := rig.Texts(t, *rig.Seed+4200, 4, 300, 500)
			single := r.ServeModel("sim", "single", "")
			want := r.All(single.URL, prompts, 4)
			r.Stop(single)
			m, settings := folders(r), c.saves(r)
			p := r.ServeModel("sim", "first", m.Config("kv_both", "store", settings))
			rig.Same(t, "stored", want, r.All(p.URL, prompts, 2))
			r.Idle(p)
			r.Stop(p)
			if c.between != nil {
				c.between(r, m, settings)
			}
			if c.loads != nil {
				settings = c.loads(r, settings)
			}
			d := r.ServeModel("sim", "second", m.Config("kv_both", "store", settings), "--enable-prefix-caching=false")
			c.misses(r, d, prompts, want)
		})
	}
}

// misses has an engine load what it cannot check.
func (c *keysCase) misses(r *rig.Rig, d *cluster.Process, prompts []string, want []*cluster.Completion) {
	r.Helper()
	rig.Same(r.T, "misses", want, r.All(d.URL, prompts, 2))
	r.Idle(d)
	before := r.Metrics(d)
	missed := before.Sum("kvport_digest_misses_total", fmt.Sprintf("reason=%q", c.reason))
	require.Positive(r, missed)
	require.InDelta(r, missed, before.Sum("kvport_digest_misses_total"), 0, "of no other reason")
	require.Zero(r, before.Sum("kvport_integrity_failures_total"))
	r.NobodyBlamed(d)
	require.NoError(r, d.Logged(r.Context(), c.says))
	line := lineWith(d, c.says)
	require.Contains(r, line, "remedy")
	require.Contains(r, line, c.seen)
	r.Log(line)

	rig.Same(r.T, "replaced", want, r.All(d.URL, prompts, 2))
	after := r.Metrics(d)
	require.Greater(r, after.Sum("kvport_prompt_tokens_total", `source="external"`), before.Sum("kvport_prompt_tokens_total", `source="external"`))
	require.InDelta(r, missed, after.Sum("kvport_digest_misses_total"), 0, "every block was replaced")
}

// newKey are settings with a new file of keys.
func newKey(r *rig.Rig) string {
	path, _ := r.Ring()
	return keyFile(path)
}

func anotherKey(r *rig.Rig, _ string) string { return newKey(r) }

func keyFile(path string) string { return fmt.Sprintf(`{"ticket_key_file":%q}`, path) }

// pathOf is the file of settings that keyFile has made.
func pathOf(settings string) string { return strings.Split(settings, `"`)[3] }

// beforeRotation ends the name of a copy of a file of keys.
const beforeRotation = ".before"

// plainDigests are settings for digests without a key.
func plainDigests(*rig.Rig) string { return `{"digest":"xxh3"}` }

// lineWith is the first line of a process's output that has a text.
func lineWith(p *cluster.Process, text string) string {
	for line := range strings.Lines(p.Logs()) {
		if strings.Contains(line, text) {
			return line
		}
	}
	return ""
}

// TestRefreshedBlocks: prefill and decode with a folder between them go on after a key was lost, and after an upgrade: the
// producer, which never loads, replaces what it has to compute.
func TestRefreshedBlocks(t *testing.T) {
	r := rig.New(t)
	r.Refreshed(folders(r))
}
