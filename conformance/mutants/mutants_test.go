package mutants_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/conformance/mutants"
)

// Profiles that need no process of the connector's own.
func inProcess() []conformance.Profile {
	return []conformance.Profile{conformance.Store, conformance.MultiRank, conformance.Groups, conformance.Power, conformance.LayerWise}
}

// needDisk lists the cases that a machine may not permit.
func needDisk() []string { return []string{"disk-full", "read-only-disk"} }

func TestReferenceInProcess(t *testing.T) {
	conformance.Run(t, conformance.InProcess(mutants.Reference(), nil), inProcess()...)
}

func TestMultiReference(t *testing.T) {
	profiles := []conformance.Profile{conformance.Store, conformance.MultiRank, conformance.Groups, conformance.MultiChildren}
	conformance.Run(t, conformance.InProcess(mutants.MultiReference(), json.RawMessage(mutants.MultiConfig)), profiles...)
	conformance.Run(t, conformance.Wire(mutants.MultiReference(), json.RawMessage(mutants.MultiConfig)), profiles...)
}

func TestMultiStoreReference(t *testing.T) {
	config := json.RawMessage(mutants.MultiStoreConfig)
	for _, h := range []conformance.Maker{conformance.InProcess(mutants.MultiReference(), config), conformance.Wire(mutants.MultiReference(), config)} {
		results := conformance.Check(t.Context(), h, conformance.Options{Only: []string{"multi-named", "multi-layers", "multi-layers-give-up"}, Seed: 7})
		require.Len(t, results, 3)
		for _, r := range results {
			require.Equal(t, conformance.Pass, r.Status, "%s: %v", r.ID, r.Log)
		}
	}
}

func TestReferenceOverTheWire(t *testing.T) {
	conformance.Run(t, conformance.Wire(mutants.Reference(), nil), inProcess()...)
}

func TestStoreReference(t *testing.T) {
	conformance.Run(t, conformance.InProcess(mutants.StoreReference(), nil))
}

// A connector that is busy with other calls when a large save comes, and takes it at another try, is right in all cases.
func TestSavesAreTriedAgain(t *testing.T) {
	for _, r := range conformance.Check(t.Context(), conformance.InProcess(mutants.AskAgain(), nil), conformance.Options{Only: []string{"offered-whole", "concurrent"}}) {
		require.Equal(t, conformance.Pass, r.Status, "%s: %v", r.ID, r.Log)
	}
}

func TestPlacingReference(t *testing.T) {
	conformance.Run(t, conformance.InProcess(mutants.PlacingReference(), nil))
	conformance.Run(t, conformance.Wire(mutants.PlacingReference(), nil))
	conformance.Run(t, conformance.Staged(conformance.Wire(mutants.PlacingReference(), nil)), conformance.Place)
}

func TestLendingReference(t *testing.T) {
	conformance.Run(t, conformance.InProcess(mutants.LendingReference(), nil))
	conformance.Run(t, conformance.Wire(mutants.LendingReference(), nil), conformance.Place)
	conformance.Run(t, conformance.Staged(conformance.Wire(mutants.LendingReference(), nil)), conformance.Place)
}

// Optional cases are skipped where they do not apply. These do apply here, at each trust level and over the wire, and at level staged they find their mutants, too.
func TestLendingIsJudged(t *testing.T) {
	ids := []string{"lent", "lent-found", "lent-back"}
	for _, h := range []conformance.Maker{
		conformance.InProcess(mutants.LendingReference(), nil), conformance.Wire(mutants.LendingReference(), nil), conformance.Staged(conformance.Wire(mutants.LendingReference(), nil)),
	} {
		for _, r := range conformance.Check(t.Context(), h, conformance.Options{Only: ids}) {
			if decided(t, r) {
				require.Equal(t, conformance.Pass, r.Status, "%s: %v", r.ID, r.Log)
			}
		}
	}
	for _, m := range mutants.All() {
		if slices.Contains(ids, m.Case) {
			r := conformance.Check(t.Context(), conformance.Staged(conformance.Wire(m.Plugin(), nil)), conformance.Options{Only: []string{m.Case}})[0]
			if decided(t, r) {
				require.Equal(t, conformance.Fail, r.Status, "staged: %s", m.Name)
			}
		}
	}
}

func TestCompleteReference(t *testing.T) {
	for _, h := range []conformance.Maker{conformance.InProcess(mutants.CompleteReference(), nil), conformance.Wire(mutants.CompleteReference(), nil)} {
		conformance.Run(t, h, conformance.Place)
		for seed := range uint64(5) {
			r := conformance.Check(t.Context(), h, conformance.Options{Only: []string{"place-complete"}, Seed: seed})[0]
			require.Equal(t, conformance.Pass, r.Status, "seed %d: %v", seed, r.Log)
		}
	}
}

func TestArenaReference(t *testing.T) {
	conformance.Run(t, conformance.InProcess(mutants.ArenaReference(), nil))
	conformance.Run(t, conformance.Wire(mutants.ArenaReference(), nil))
}

// What runs in this process passes or says that it needs one of its own; nothing else is skipped.
func TestFaultsInProcess(t *testing.T) {
	files := mutants.Files()
	count := map[conformance.Status]int{}
	var only []string
	for _, c := range conformance.Cases() {
		if slices.Contains(c.Profiles, conformance.Fault) || slices.Contains(c.Profiles, conformance.Lifecycle) {
			only = append(only, c.ID)
		}
	}
	for _, harness := range []conformance.Maker{
		conformance.InProcess(files, filesConfig()), conformance.Wire(files, filesConfig()), conformance.Staged(conformance.Wire(files, filesConfig())),
	} {
		for _, r := range conformance.Check(t.Context(), harness, conformance.Options{Only: only}) {
			require.NotEqual(t, conformance.Fail, r.Status, "%s: %v", r.ID, r.Log)
			decided(t, r)
			if r.Status == conformance.Skip && !slices.Contains(needDisk(), r.ID) {
				require.Contains(t, r.Log[0], "kvport conform runs", r.ID)
			}
			count[r.Status]++
		}
	}
	t.Logf("%d passed, %d skipped", count[conformance.Pass], count[conformance.Skip])
	require.Greater(t, count[conformance.Pass], 50)
}

func filesConfig() json.RawMessage { return json.RawMessage(`{"dir": "@TMP@/kv"}`) }

// shardEnv says to a process of this test which of its mutants are its own. Most wait for what never comes,
// and some change what a process has once, so that they run beside each other as processes.
const shardEnv = "KVPORT_TEST_SHARD"

const (
	shards     = 3
	everyShard = -1
)

// shard is the number of this process; the first starts the others, which wait ends. Whoever picks mutants by
// -run has them all in one process, everyShard.
func shard(t *testing.T) (own int, wait func()) {
	if own, err := strconv.Atoi(os.Getenv(shardEnv)); err == nil {
		return own, func() {}
	}
	if strings.Contains(flag.Lookup("test.run").Value.String(), "/") {
		return everyShard, func() {}
	}
	var others []func()
	for n := 1; n < shards; n++ {
		args := []string{"-test.run=^" + t.Name() + "$", fmt.Sprintf("-test.short=%v", testing.Short()), "-test.v"}
		cmd := exec.CommandContext(t.Context(), os.Args[0], args...)
		cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d", shardEnv, n))
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		require.NoError(t, cmd.Start())
		others = append(others, func() {
			err := cmd.Wait()
			if err != nil || testing.Verbose() {
				t.Logf("process %d of %d:\n%s", n, shards, &out)
			}
			require.NoError(t, err)
			require.Contains(t, out.String(), "mutants caught")
		})
	}
	return 0, func() {
		for _, wait := range others {
			wait()
		}
	}
}

// belongs reports whether mutant n is of the process with the number own.
func belongs(n, own int) bool { return own == everyShard || n/2%shards == own }

// harnessOf runs a mutant in this process, unless it is a program.
func harnessOf(t *testing.T, m mutants.Mutant) conformance.Maker {
	switch {
	case m.Program != "":
		if testing.Short() {
			t.Skip("a process; make test runs it")
		}
		return conformance.Binary(plugin(t, m.Program), json.RawMessage(m.Config))
	case slices.Contains(racy(), m.Case):
		// Its late write, or early read, is a data race by definition. Through the protocol, in memory that
		// is mapped twice, the race detector does not see it, but the case must.
		return conformance.Wire(m.Plugin(), json.RawMessage(m.Config))
	}
	return conformance.InProcess(m.Plugin(), json.RawMessage(m.Config))
}

// Every mutant fails the case that is named for its fault, and every case has a mutant.
func TestMutantsAreCaught(t *testing.T) {
	own, wait := shard(t)
	defer wait()
	uncovered := map[string]bool{}
	for _, c := range conformance.Cases() {
		uncovered[c.ID] = true
	}
	caught, undecided, mine := 0, 0, 0
	all := mutants.All()
	for n, m := range all {
		delete(uncovered, m.Case)
		if !belongs(n, own) {
			continue
		}
		mine++
		t.Run(m.Case+"/"+m.Name, func(t *testing.T) {
			if testing.Short() && mine%3 > 0 { // of each process's own
				t.Skip("with -short, which the race stage uses, one in three; make test runs all")
			}
			newHarness := harnessOf(t, m)
			// Less patience than a connector that may be right deserves: these are wrong.
			o := conformance.Options{Only: []string{m.Case}, Seed: 7, Deadline: 24 * time.Second, Budget: 3 * time.Second} // a busy machine plays fewer histories in it
			results := conformance.Check(t.Context(), newHarness, o)
			chance := byChance(m.Program, m.Case)
			for seed := uint64(8); chance && seed < 12 && results[0].Status == conformance.Pass; seed++ {
				o.Seed = seed
				results = conformance.Check(t.Context(), newHarness, o)
			}
			require.Len(t, results, 1)
			if results[0].Status == conformance.Skip && slices.Contains(needDisk(), m.Case) {
				t.Skip(results[0].Log[0])
			}
			if !decided(t, results[0]) {
				undecided++
				t.SkipNow()
			}
			require.Equal(t, conformance.Fail, results[0].Status, "nobody noticed: %v", results[0].Log)
			t.Log(results[0].Status, results[0].Log[0])
			require.NotContains(t, results[0].Log[0], "panic", "it must fail by its rule, not by accident")
			caught++
		})
	}
	require.Empty(t, uncovered, "cases that no mutant fails")
	require.True(t, caught > 0 || own == everyShard, "not one verdict")
	t.Logf("%d of %d mutants caught by process %d, %d without a verdict, %d mutants and %d cases in all", caught, mine, own, undecided, len(all), len(conformance.Cases()))
}

// byChance reports whether a mutant has more chances to be noticed: what a killed process leaves behind depends on
// when the kill meets it, what bytes that are changed on their way belong to on how the system cuts them up, which of three calls
// comes first on the scheduler, and how many random histories are played on how fast the machine is.
func byChance(program, name string) bool {
	return program != "" || strings.HasPrefix(name, "pd-corrupt") || strings.HasPrefix(name, "random") || name == "layer-many" || name == "beside-cancelled"
}

// racy are the cases whose mutants write, or read, what they must not yet.
func racy() []string {
	return []string{"load-ends", "pd-asked-late", "pd-cancel", "pd-corrupt-asked", "pd-deadline", "pd-late", "pd-late-next", "pd-under-way", "layer-order", "layer-digests", "layer-groups", "layer-read", "layer-deep"}
}

// The names are what a report of this test shows, so each is used once.
func TestMutantsHaveNames(t *testing.T) {
	var names []string
	for _, m := range mutants.All() {
		names = append(names, m.Name)
	}
	slices.Sort(names)
	require.Len(t, slices.Compact(names), len(names))
}

func TestOffloadReference(t *testing.T) {
	config := json.RawMessage(`{"disk_path":"@TMP@/tier","disk_bytes":65536}`)
	conformance.Run(t, conformance.InProcess(mutants.Offload(""), config), conformance.Store, conformance.Offload)
	for _, c := range []json.RawMessage{json.RawMessage(`{"num_cpu_blocks":64}`), config} {
		r := conformance.Check(t.Context(), conformance.Wire(mutants.Watched(""), c), conformance.Options{Only: []string{"event-evicted"}})[0]
		if decided(t, r) {
			require.Equal(t, conformance.Pass, r.Status, "%v", r.Log)
		}
	}
}

// The verdict of a run that ends at the first failure is about the fault: where saves are acknowledged too early most cases fail, and only one
// says why.
func TestFirstVerdict(t *testing.T) {
	for _, m := range mutants.All() {
		if m.Name != "acknowledges saves it has not done yet" {
			continue
		}
		results := conformance.Check(t.Context(), conformance.InProcess(m.Plugin(), nil), conformance.Options{FailFast: true, Seed: 7})
		require.Len(t, results, 1)
		require.Equal(t, "visible", results[0].ID)
		require.Equal(t, "WORK-05", results[0].Rule)
		return
	}
	require.Fail(t, "no such mutant")
}
