package acceptance

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/fixture"
	"github.com/kvport/kvport/verify/testkit"
)

var flagSeeds = flag.Int("seeds", 0, "seeds of random histories on every connector; default 1 on those that stand for others, in soak 100")

// stateVariable names a folder in which a test notes how far it has come, so that the next run goes on there; scripts/soak.py sets it.
const stateVariable = "KVPORT_SOAK_STATE"

// TestSeeds plays the random cases of the suite with many seeds on every plugin and example, with each of its configs, in processes of their
// own. A seed that fails, or stays without a verdict, fails the test. What an earlier run with the same state and the same programs has passed
// counts as well, and what it has not passed is played again.
func TestSeeds(t *testing.T) {
	if testing.Short() {
		t.Skip("starts plugins that make build has built: left out with -short, which the race stage uses")
	}
	full := os.Getenv("KVPORT_SOAK") != "" // then a connector that cannot be tested here is red
	seeds := rig.Count(t, "seeds", *flagSeeds, 1, 100)
	log := openSeedLog(t)
	for _, f := range testkit.Fixtures(t) {
		if !full && *flagSeeds == 0 && f.Typical == "" {
			continue
		}
		t.Run(f.Folder, func(t *testing.T) {
			p := &seedPlay{T: t, log: log, cases: randomCases(f.Profiles), budget: 200 * time.Millisecond}
			if full {
				p.budget = time.Second
			}
			if len(p.cases) == 0 {
				t.Logf("no random case is for %v", f.Profiles)
				return
			}
			defer func() {
				if full && t.Skipped() {
					t.Error("it is not tested")
				}
			}()
			rig.Need(t, f.Needs)
			path := program(t, f)
			p.programs = hashed(t, path, "/proc/self/exe", p.budget.String())
			for _, name := range configNames(t, f) {
				for seed := 1; seed <= seeds; seed++ {
					p.seed(f, path, name, seed)
				}
			}
			t.Log(p.sum())
		})
	}
}

// randomCases are the cases that play random histories with connectors of these profiles.
func randomCases(profiles []string) (ids []string) {
	for _, c := range conformance.Cases() {
		if strings.HasPrefix(c.ID, "random") && slices.ContainsFunc(c.Profiles, func(p conformance.Profile) bool { return slices.Contains(profiles, string(p)) }) {
			ids = append(ids, c.ID)
		}
	}
	return ids
}

// configNames are the files with configs in the folder of a fixture; "" stands for none.
func configNames(t *testing.T, f *fixture.Fixture) (names []string) {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(testkit.Root(t), f.Folder, "conform*.json"))
	require.NoError(t, err)
	for _, path := range paths {
		names = append(names, filepath.Base(path))
	}
	if !slices.Contains(names, "conform.json") {
		names = append(names, "")
	}
	return names
}

// hashed is a short name of what programs are: the bytes of two, and how they are used.
func hashed(t *testing.T, plugin, suite, how string) string {
	t.Helper()
	sum := sha256.New()
	for _, path := range []string{plugin, suite} {
		data, err := os.ReadFile(path)
		require.NoError(t, err)
		sum.Write(data)
	}
	sum.Write([]byte(how))
	return hex.EncodeToString(sum.Sum(nil)[:8])
}

// seeded is what a random case with one seed has found.
type seeded struct {
	Programs string             `json:"programs"` // the plugin, its config and the suite, as a hash
	Folder   string             `json:"folder"`
	Config   string             `json:"config"`
	Case     string             `json:"case"`
	Seed     int                `json:"seed"`
	Status   conformance.Status `json:"status"`
	Said     []string           `json:"said,omitempty"`
}

func (s *seeded) key() string {
	return fmt.Sprintf("%s %s %s %d (%s)", s.Folder, s.Config, s.Case, s.Seed, s.Programs)
}

// seedLog is what was played so far, also in earlier runs.
type seedLog struct {
	path string // "": it is not kept
	done map[string]seeded
}

// openSeedLog reads what earlier runs have passed.
func openSeedLog(t *testing.T) *seedLog {
	t.Helper()
	l := &seedLog{done: map[string]seeded{}}
	folder := os.Getenv(stateVariable)
	if folder == "" {
		return l
	}
	l.path = filepath.Join(folder, "seeds.jsonl")
	file, err := os.Open(l.path)
	if errors.Is(err, fs.ErrNotExist) {
		return l
	}
	require.NoError(t, err)
	defer file.Close()
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var s seeded
		if json.Unmarshal(lines.Bytes(), &s) == nil && s.Status == conformance.Pass { // the last line of a run that was killed may be cut
			l.done[s.key()] = s
		}
	}
	require.NoError(t, lines.Err())
	return l
}

// add notes a result.
func (l *seedLog) add(t *testing.T, s seeded) {
	t.Helper()
	l.done[s.key()] = s
	if l.path == "" {
		return
	}
	line, err := json.Marshal(s)
	require.NoError(t, err)
	file, err := os.OpenFile(l.path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	require.NoError(t, err)
	_, err = file.Write(append(line, '\n'))
	require.NoError(t, errors.Join(err, file.Close()))
}

// seedPlay plays the cases of one connector.
type seedPlay struct {
	*testing.T
	log    *seedLog
	cases  []string
	budget time.Duration
	count  map[conformance.Status]int
	before int // passed in an earlier run

	programs string
}

// few is for how many seeds a case is played whose calls are always the same.
const few = 3

// of are the cases that are played with a seed.
func (p *seedPlay) of(seed int) []string {
	return slices.DeleteFunc(slices.Clone(p.cases), func(id string) bool { return id == "random-growth" && seed > few })
}

// seed plays what has not been played yet with a seed, and tells what was found.
func (p *seedPlay) seed(f *fixture.Fixture, path, name string, seed int) {
	p.Helper()
	o := conformance.Options{Seed: uint64(seed), Budget: p.budget} //nolint:gosec // not negative
	for _, profile := range f.Profiles {
		o.Profiles = append(o.Profiles, conformance.Profile(profile))
	}
	config := json.RawMessage(`{}`)
	if name != "" {
		text, err := os.ReadFile(filepath.Join(testkit.Root(p), f.Folder, name))
		require.NoError(p, err)
		config = text
	}
	sum := sha256.Sum256(append([]byte(p.programs), config...))
	one := seeded{Programs: hex.EncodeToString(sum[:8]), Folder: f.Folder, Config: name, Seed: seed}
	for _, one.Case = range p.of(seed) {
		if _, done := p.log.done[one.key()]; done {
			p.before++
		} else {
			o.Only = append(o.Only, one.Case)
		}
	}
	if len(o.Only) > 0 {
		for _, r := range conformance.Check(p.Context(), conformance.Binary(path, config), o) {
			one.Case, one.Status, one.Said = r.ID, r.Status, nil
			if r.Status != conformance.Pass {
				one.Said = slices.Concat(r.Log, r.Transcript, r.LastWords, r.Stacks)
			}
			p.log.add(p.T, one)
		}
	}
	for _, one.Case = range p.of(seed) {
		p.tell(p.log.done[one.key()])
	}
}

// tell fails the test for what failed, and for what has no verdict unless that is permitted.
func (p *seedPlay) tell(s seeded) {
	p.Helper()
	if p.count == nil {
		p.count = map[conformance.Status]int{}
	}
	p.count[s.Status]++
	switch {
	case s.Status == conformance.Pass:
	case s.Status == conformance.Inconclusive && os.Getenv(conformance.MayBeInconclusive) != "":
		p.Logf("%s has no verdict: %v", s.key(), s.Said)
	default: // a case that is skipped is one that does not fit the profiles of the fixture
		p.Errorf("%s: %s\n%s", s.key(), s.Status, strings.Join(s.Said, "\n"))
	}
}

// sum is what a connector's seeds have found.
func (p *seedPlay) sum() string {
	return fmt.Sprintf("%s: %d passed (%d of them in an earlier run), %d failed, %d without a verdict, of %s", strings.TrimPrefix(p.Name(), "TestSeeds/"),
		p.count[conformance.Pass], p.before, p.count[conformance.Fail]+p.count[conformance.Skip], p.count[conformance.Inconclusive], strings.Join(p.cases, ", "))
}
