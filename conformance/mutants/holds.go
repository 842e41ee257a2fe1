package mutants

// holdFaults are about what other holds do to a hold; the cases of pairs have each hold by itself, or all of them treated alike.
func holdFaults() (out []Unseen) {
	arrives := []string{"PD-01", "PD-07", "PD-14"}
	for _, f := range []struct {
		name   string
		faults pdFaults
		rules  []string
		also   []string // named cases that find it, too
	}{
		{"a hold that ends with another whose prompt begins alike", pdFaults{endsAlike: true}, arrives, []string{"pd-alike"}},
		{"a hold that ends when a request is aborted whose prompt begins alike", pdFaults{abortsAlike: true}, arrives, nil},
		{"sixteen numbers for holds", pdFaults{sixteen: true}, append(arrives, "HOLD-02"), nil},
		{"one report for holds that end at about the same time", pdFaults{reportsOne: true}, []string{"PD-04"}, []string{"pd-alike"}},
	} {
		m := pdMutant(f.name, "random-holds", f.faults)
		if f.faults.reportsOne { // what is fetched late in its lease may not be reported
			m.Config = `{"lease_ms":60000}`
		}
		out = append(out, Unseen{Class: pairs, Rules: f.rules, Mutant: m, Also: f.also})
	}
	return out
}
