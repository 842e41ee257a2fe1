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
	prompts, want := r.Unaligned(rig.Texts(t, *rig.Seed+4100, 8, 700, 900), 4)
	r.Forgeries(folders(r), prompts, want)
}

// TestKeysOfStores: what an operator sees whose engines have other keys, another edition or an old store is in a table of
// docs/operate.md, and no token is wrong.
func TestKeysOfStores(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(testkit.Root(t), "docs", "operate.md"))
	require.NoError(t, err)
	const key, edition = "blocks were stored with a key that is not in the ring, they count as misses", "blocks were stored by another version or with another kvport.digest, they count as misses"
	for _, c := range []struct {
		name         string
		row          string // the table says so
		says         string
		reason       string
		saves, loads func(r *rig.Rig) string // settings
		between      func(r *rig.Rig, m *rig.Medium, saved string)
		seen         string
	}{
		{name: "another machine's key", row: "two machines have different keys", says: key, reason: "foreign_key", saves: newKey, loads: newKey},
		{
			name: "a key that was dropped", row: "a key was dropped, or lost with its file", says: key, reason: "foreign_key", saves: newKey, loads: oldFile,
			between: func(r *rig.Rig, _ *rig.Medium, saved string) {
				path := fileOf(saved)
				old := r.Keys(path, "list")[0]
				ids := r.Keys(path, "rotate")
				r.Keys(path, "rotate", "--promote", ids[1])
				r.Keys(path, "rotate", "--drop", old)
			},
		},
		{
			name: "a store of an earlier version", row: "an earlier version has stored the block", says: edition, reason: "edition", saves: newKey, loads: oldFile,
			seen: "another length",
			between: func(_ *rig.Rig, m *rig.Medium, _ string) {
				for _, key := range m.Keys("store") {
					value := m.Get("store", key)
					m.Set("store", key, m.Whole(value[:len(value)-16]))
				}
			},
		},
		{name: "xxh3 and keyed", row: "another engine has `\"digest\": \"xxh3\"`, and this one does not, or the reverse", says: edition, reason: "edition", saves: plainDigests, loads: newKey, seen: "edition 1"},
		{name: "keyed and xxh3", row: "another engine has `\"digest\": \"xxh3\"`, and this one does not, or the reverse", says: edition, reason: "edition", saves: newKey, loads: plainDigests, seen: "edition 2"},
	} {
		t.Run(c.name, func(t *testing.T) {
			require.Contains(t, string(page), "| "+c.row+" |")
			require.Contains(t, string(page), c.says)
			r := rig.New(t)
			prompts := rig.Texts(t, *rig.Seed+4200, 4, 300, 500)
			single := r.ServeModel("sim", "single", "")
			want := r.All(single.URL, prompts, 4)
			r.Stop(single)
			m, saved := folders(r), c.saves(r)
			p := r.ServeModel("sim", "first", m.Config("kv_both", "store", saved))
			rig.Same(t, "stored", want, r.All(p.URL, prompts, 2))
			r.Idle(p)
			r.Stop(p)
			if c.between != nil {
				c.between(r, m, saved)
			}
			loads := saved
			if c.loads != nil {
				if s := c.loads(r); s != "" {
					loads = s
				}
			}
			d := r.ServeModel("sim", "second", m.Config("kv_both", "store", loads), "--enable-prefix-caching=false")
			rig.Same(t, "misses", want, r.All(d.URL, prompts, 2))
			metrics := r.Metrics(d)
			require.Positive(t, metrics.Sum("kvport_digest_misses_total", fmt.Sprintf("reason=%q", c.reason)))
			require.Equal(t, metrics.Sum("kvport_digest_misses_total"), metrics.Sum("kvport_digest_misses_total", fmt.Sprintf("reason=%q", c.reason)))
			for _, name := range []string{"kvport_integrity_failures_total", "kvport_plugin_violations_total", "kvport_plugin_restarts_total", "kvport_plugin_breaker_open"} {
				require.Zero(t, metrics.Sum(name), name)
			}
			line := lineWith(d, c.says)
			require.NotEmpty(t, line, d.Logs())
			require.Contains(t, line, "remedy")
			require.Contains(t, line, c.seen)
			t.Log(line)

			r.Idle(d)
			before := r.Metrics(d)
			rig.Same(t, "replaced", want, r.All(d.URL, prompts, 2))
			after := r.Metrics(d)
			require.Greater(t, after.Sum("kvport_prompt_tokens_total", `source="external"`), before.Sum("kvport_prompt_tokens_total", `source="external"`))
			require.Equal(t, before.Sum("kvport_digest_misses_total"), after.Sum("kvport_digest_misses_total"), "every block was replaced")
		})
	}
}

// newKey are settings with a new file of keys.
func newKey(r *rig.Rig) string {
	path, _ := r.Ring()
	return fmt.Sprintf(`{"ticket_key_file":%q}`, path)
}

// oldFile stands for the settings of the engine before.
func oldFile(*rig.Rig) string { return "" }

func plainDigests(*rig.Rig) string { return `{"digest":"xxh3"}` }

// fileOf is the file of keys of settings that newKey has made.
func fileOf(settings string) string { return strings.Split(settings, `"`)[3] }

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
