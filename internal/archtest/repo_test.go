package archtest

import (
	"cmp"
	"testing"
)

// TestRepository applies the policy to this repository.
func TestRepository(t *testing.T) {
	tree, err := Load("../..")
	if err != nil {
		t.Fatal(err)
	}
	if len(tree.Files) == 0 {
		t.Fatal("no Go file read")
	}
	policy := Kvport()
	for _, v := range tree.Check(policy) {
		t.Error(v)
	}
	for file := range policy.Names {
		if _, ok := tree.Texts[file]; !ok {
			t.Errorf("%s: %s is not there, and may not name connectors any more", policyFile, file)
		}
	}
}

// TestWords keeps the allowance of plain words at what is there: a number only falls. With -v it lists
// every phrase that is left.
func TestWords(t *testing.T) {
	tree, err := Load("../..")
	if err != nil {
		t.Fatal(err)
	}
	policy := Kvport()
	counts := map[string]int{}
	for _, o := range tree.Words(policy) {
		counts[o.Row]++
		t.Log(o)
	}
	for _, row := range sortedKeys(policy.Words) {
		if counts[row] < policy.Words[row] {
			t.Errorf("lower the number of %q in kvportWords from %d to %d", row, policy.Words[row], counts[row])
		}
	}
	for _, row := range sortedKeys(counts) {
		t.Logf("%s: %d", cmp.Or(row, "elsewhere"), counts[row])
	}
}
