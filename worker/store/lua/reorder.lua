-- Put the first `most` jobs of a queue in the order `order`, which was made from a look shortly before.
--
-- Jobs that were claimed since are left out. Jobs that came since stay: those before all known jobs stay before them,
-- and the others stay behind. Returns the number of jobs that were written.
local waiting = 'rq:queue:' .. args.queue
local present = call('LRANGE', waiting, 0, args.most - 1)

local is_known = {}
local count = {} -- how often a job stands in the queue
for _, id in ipairs(args.order) do is_known[id] = true end
for _, id in ipairs(present) do count[id] = (count[id] or 0) + 1 end

local first, last = {}, {} -- the unknown jobs before all known ones, and the other unknown jobs
local has_seen_known = false
for _, id in ipairs(present) do
  if is_known[id] then
    has_seen_known = true
  elseif has_seen_known then
    last[#last + 1] = id
  else
    first[#first + 1] = id
  end
end

local jobs = first
for _, id in ipairs(args.order) do
  if (count[id] or 0) > 0 then
    count[id] = count[id] - 1
    jobs[#jobs + 1] = id
  end
end
for _, id in ipairs(last) do jobs[#jobs + 1] = id end

call('LTRIM', waiting, #present, -1)
for i = #jobs, 1, -1000 do
  local chunk = {}
  for j = i, math.max(i - 999, 1), -1 do chunk[#chunk + 1] = jobs[j] end
  call('LPUSH', waiting, unpack(chunk))
end
return #jobs
